#include "services/engine/runtime/prompt_fetch.h"

#include <algorithm>
#include <utility>

namespace spl::engine {
namespace {

SteadyTime::duration Duration(double seconds) {
  return std::chrono::duration_cast<SteadyTime::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

bool PromptFetch::MayBegin(SteadyTime now) const {
  std::lock_guard lock(mutex_);
  return over_ || now >= held_until_;
}

bool PromptFetch::over() const {
  std::lock_guard lock(mutex_);
  return over_;
}

bool PromptFetch::reading() const {
  std::lock_guard lock(mutex_);
  return reading_;
}

void PromptFetch::StartReading() {
  std::lock_guard lock(mutex_);
  reading_ = true;
}

SteadyTime PromptFetch::held_until() const {
  std::lock_guard lock(mutex_);
  return held_until_;
}

double PromptFetch::SecondsLeft(SteadyTime now) const {
  std::lock_guard lock(mutex_);
  return over_ ? 0 : std::max(0.0, std::chrono::duration<double>(expected_end_ - now).count());
}

FetchedSegments PromptFetch::TakeSegments() {
  std::lock_guard lock(mutex_);
  segments_taken_ = true;
  report_.segment_bytes = segments_.num_bytes;
  report_.segment_tokens = segments_.num_tokens;
  return std::exchange(segments_, {});
}

PositionRange PromptFetch::Close() {
  closed_.store(true, std::memory_order_relaxed);
  return prefix.Close();
}

void PromptFetch::Begun(SteadyTime now) {
  std::lock_guard lock(mutex_);
  report_.begun = now;
}

void PromptFetch::FoundPrefix(size_t num_chunks) {
  std::lock_guard lock(mutex_);
  report_.found_chunks = num_chunks;
  report_.found_tokens += static_cast<int64_t>(num_chunks) * kernels::kPageTokens;
}

void PromptFetch::FoundSegment(int64_t num_tokens) {
  std::lock_guard lock(mutex_);
  report_.found_tokens += num_tokens;
}

void PromptFetch::Hold(SteadyTime now, double held_s, std::optional<double> expected_s) {
  std::lock_guard lock(mutex_);
  held_until_ = now + Duration(held_s);
  expected_end_ = now + Duration(expected_s.value_or(0));
}

void PromptFetch::Deliver(FetchedSegments&& segments) {
  std::lock_guard lock(mutex_);
  if (segments_taken_) return;
  segments_.num_bytes += segments.num_bytes;
  segments_.num_tokens += segments.num_tokens;
  segments_.parts.merge(segments.parts);
  segments_.not_quantized.insert(segments_.not_quantized.end(), segments.not_quantized.begin(),
                                 segments.not_quantized.end());
}

void PromptFetch::End(SteadyTime now, bool slower) {
  std::lock_guard lock(mutex_);
  over_ = true;
  report_.slower = slower;
  report_.seconds = std::chrono::duration<double>(now - report_.begun).count();
}

PromptFetch::Report PromptFetch::report() const {
  std::lock_guard lock(mutex_);
  return report_;
}

}  // namespace spl::engine
