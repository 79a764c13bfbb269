#include "services/engine/runtime/prompt_fetcher.h"

#include <algorithm>
#include <utility>

#include "services/base/fault_point.h"
#include "services/base/trace.h"
#include "services/engine/cache/chunk_io.h"

namespace spl::engine {
namespace {

using Clock = std::chrono::steady_clock;

FaultPoint fetch_fault("engine.prefill.fetch");

constexpr std::chrono::milliseconds kIdleWait{100};  // a safety net: Stop closes the queue

}  // namespace

PromptFetcher::PromptFetcher(std::shared_ptr<const Model> model, PagePool& pool, LocalKv& local, PageBudget& budget,
                             const PrefillEngineOptions& options, std::function<void()> on_fetched)
    : model_(std::move(model)),
      local_(local),
      options_(options),
      on_fetched_(std::move(on_fetched)),
      segments_(model_, pool, local.segments, options_.store,
                [&budget](int64_t num_pages) { return budget.MakeRoom(num_pages, false); }),
      queue_(options.max_concurrent) {}

void PromptFetcher::Start() {
  if (options_.store == nullptr) return;
  for (int i = 0; i < std::max(1, options_.num_fetch_threads); ++i) threads_.emplace_back([this] { Loop(); });
}

bool PromptFetcher::Take(const std::shared_ptr<PrefillJob>& job, size_t num_here) {
  if (options_.store == nullptr || job->publish) return false;
  if (num_here >= job->reusable_keys().size() && WantedSegments(*job).empty()) return false;
  if (!queue_.TryPush(job)) return false;
  ++num_fetching_;
  return true;
}

PromptFetcher::Jobs PromptFetcher::TakeFetched() {
  Jobs jobs;
  {
    std::lock_guard lock(mutex_);
    jobs.swap(fetched_);
  }
  while (queue_.closed()) {
    auto job = queue_.TryPop();
    if (!job) break;
    jobs.push_back(*std::move(job));
  }
  num_fetching_ -= jobs.size();
  return jobs;
}

bool PromptFetcher::has_fetched() const {
  std::lock_guard lock(mutex_);
  return !fetched_.empty();
}

void PromptFetcher::Stop() {
  queue_.Close();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void PromptFetcher::Loop() {
  while (!queue_.closed()) {
    auto job = queue_.Pop(kIdleWait);
    if (!job) continue;
    Fetch(**job);
    {
      std::lock_guard lock(mutex_);
      fetched_.push_back(*std::move(job));
    }
    on_fetched_();
  }
}

void PromptFetcher::Fetch(PrefillJob& job) const {
  const auto start = Clock::now();
  const auto deadline = std::min(job.request.deadline, start + options_.store_timeout);
  const TraceScope trace(job.request.fetch_trace);
  job.stats.fetched = start;
  (void)fetch_fault.Hit();
  FetchPrefix(job, deadline);
  job.fetched = segments_.Fetch(WantedSegments(job), *job.policy, deadline, [&] { return job.cancelled(); });
  job.stats.fetched_bytes += job.fetched.num_bytes;
  job.stats.fetch_s = std::chrono::duration<double>(Clock::now() - start).count();
}

// The leading chunks of the prompt, into the job's pages.
void PromptFetcher::FetchPrefix(PrefillJob& job, SteadyTime deadline) const {
  const int64_t cached = job.cached();
  const size_t first = cached / kernels::kPageTokens;
  const std::span<const chunk::ChunkKey> keys = job.reusable_keys().subspan(first);
  if (keys.empty()) return;
  const FetchedPrefix fetched = engine::FetchPrefix(*options_.store, keys, static_cast<int32_t>(first), *model_,
                                                    *job.kv, deadline, [&] { return job.cancelled(); });
  job.stats.fetched_bytes += fetched.num_bytes;
  job.kv->set_num_tokens(cached + int64_t{fetched.num_chunks} * kernels::kPageTokens);
  job.stats.stored_tokens = job.cached() - cached;
  job.stats.cached_tokens = job.cached();
}

// Segments that are not here, and worth a copy.
std::vector<WantedSegment> PromptFetcher::WantedSegments(const PrefillJob& job) const {
  std::vector<WantedSegment> wanted;
  for (size_t i = 0; i < job.segment_keys.size(); ++i) {
    const ReuseSpan& segment = job.request.segments[i];
    const std::vector<chunk::ChunkKey>& keys = job.segment_keys[i];
    if (segment.range.end <= job.cached() || segment.range.size() < kSegmentTokensMin || local_.segments.Contains(keys))
      continue;
    wanted.push_back({.index = i,
                      .text = job.text_of(segment.range),
                      .keys = keys,
                      .namespace_key = segment.namespace_key,
                      .frozen = segment.frozen,
                      .shared = segment.shared,
                      .only_whole = segment.range.begin < job.cached()});
  }
  return wanted;
}

}  // namespace spl::engine
