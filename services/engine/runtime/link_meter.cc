#include "services/engine/runtime/link_meter.h"

#include <algorithm>

namespace spl::engine {
namespace {

// A half: two fetches after a change, three quarters of it are known. Prompts lose time until then.
constexpr double kSmoothing = 0.5;
// The second chunk is often in a buffer already when the first one has been verified, and says nothing about the link.
constexpr int kChunksForRate = 5;

double Seconds(SteadyTime::duration d) { return std::chrono::duration<double>(d).count(); }

}  // namespace

std::optional<double> LinkMeter::SecondsFor(int64_t bytes) const {
  std::lock_guard lock(mutex_);
  if (bytes_per_s_ <= 0) return latency_s_;  // at least that, if nothing ever came
  return latency_s_.value_or(0) + static_cast<double>(expected_bytes_ + bytes) / bytes_per_s_;
}

LinkMeter::Estimate LinkMeter::estimate() const {
  std::lock_guard lock(mutex_);
  return {latency_s_.value_or(0), bytes_per_s_, found_share_};
}

void LinkMeter::NoteFound(int64_t asked, int64_t found) {
  if (asked <= 0) return;
  std::lock_guard lock(mutex_);
  const double share = static_cast<double>(found) / static_cast<double>(asked);
  found_share_ += kSmoothing * (share - found_share_);
}

bool LinkMeter::TakeProbe(std::chrono::nanoseconds age) {
  std::lock_guard lock(mutex_);
  const SteadyTime now = clock_.Now();
  if (now - measured_ < age) return false;
  measured_ = now;
  return true;
}

void LinkMeter::NoteRate(double bytes_per_s) {
  bytes_per_s_ = bytes_per_s_ <= 0 ? bytes_per_s : bytes_per_s_ + kSmoothing * (bytes_per_s - bytes_per_s_);
  measured_ = clock_.Now();
}

void LinkMeter::NoteLatency(double seconds) {
  latency_s_ = latency_s_.has_value() ? *latency_s_ + kSmoothing * (seconds - *latency_s_) : seconds;
}

LinkMeter::Expected::Expected(LinkMeter& meter, int64_t bytes) : meter_(meter), bytes_(bytes) {
  std::lock_guard lock(meter_.mutex_);
  meter_.expected_bytes_ += bytes_;
}

LinkMeter::Expected::~Expected() {
  std::lock_guard lock(meter_.mutex_);
  meter_.expected_bytes_ -= bytes_;
}

void LinkMeter::Call::Arrived(int64_t bytes) {
  const SteadyTime now = meter_.clock_.Now();
  std::lock_guard lock(meter_.mutex_);
  meter_.total_bytes_ += bytes;
  bytes_ += bytes;
  if (++num_chunks_ == 1) {
    first_ = now;
    first_bytes_ = bytes;
    total_at_first_ = meter_.total_bytes_;
  } else if (meter_.bytes_per_s_ <= 0 && num_chunks_ >= kChunksForRate && now > first_) {
    // The very first call: whoever waits for it wants to know before it ends.
    meter_.NoteRate(static_cast<double>(meter_.total_bytes_ - total_at_first_) / Seconds(now - first_));
  }
}

void LinkMeter::Call::Ended(End how) {
  const SteadyTime now = meter_.clock_.Now();
  const double took = Seconds(now - start_);
  std::lock_guard lock(meter_.mutex_);
  if (num_chunks_ == 0) {
    // The latency is at least that.
    if (how == End::kTimeOver) meter_.latency_s_ = std::max(meter_.latency_s_.value_or(0), took);
    return;
  }
  if (num_chunks_ < kChunksForRate) {
    // Too little for a rate, but the rate cannot be more than that: a link that has become slow shows no other way,
    // since nobody waits for five chunks of it.
    const double rate = static_cast<double>(bytes_) / std::max(took - meter_.latency_s_.value_or(0), 1e-3 * took);
    const bool unknown = meter_.bytes_per_s_ <= 0;
    if (unknown ? how == End::kTimeOver : how != End::kComplete && rate < meter_.bytes_per_s_) meter_.NoteRate(rate);
    return;
  }
  if (now > first_) meter_.NoteRate(static_cast<double>(meter_.total_bytes_ - total_at_first_) / Seconds(now - first_));
  if (meter_.bytes_per_s_ <= 0) return;
  const double of_bytes = static_cast<double>(first_bytes_) / meter_.bytes_per_s_;
  meter_.NoteLatency(std::max(0.0, Seconds(first_ - start_) - of_bytes));
}

}  // namespace spl::engine
