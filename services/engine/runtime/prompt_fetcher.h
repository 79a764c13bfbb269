// Fetches chunks of waiting prompts from the chunk store, on threads of its own.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <thread>
#include <vector>

#include "services/base/bounded_queue.h"
#include "services/engine/runtime/link_meter.h"
#include "services/engine/runtime/local_kv.h"
#include "services/engine/runtime/page_budget.h"
#include "services/engine/runtime/prefill_job.h"
#include "services/engine/runtime/prefill_meter.h"
#include "services/engine/runtime/prefill_options.h"
#include "services/engine/runtime/segment_fetcher.h"

namespace spl::engine {

// A store that fails or is slow costs time, never a request. With options.fetch_by_cost it costs little time: a prompt
// computes what would take longer to fetch, and is held back for a small share of its computing time at most. Used by
// the engine thread, except where it says so.
class PromptFetcher {
 public:
  using Jobs = std::vector<std::shared_ptr<PrefillJob>>;

  // on_progress: called when a prompt may begin earlier than next_begin() said; must not block. All references outlive
  // the fetcher.
  PromptFetcher(std::shared_ptr<const Model> model, PagePool& pool, LocalKv& local, PageBudget& budget,
                const PrefillMeter& meter, const PrefillEngineOptions& options, std::function<void()> on_progress);

  void Start();
  // Takes the prompt if the store may have more of it than this worker, and the queue has room. `num_here`: leading
  // chunks that need not be fetched.
  bool Take(const std::shared_ptr<PrefillJob>& job, size_t num_here);
  // Prompts that need not wait any longer, with what has come for them. After Stop: all.
  Jobs TakeReady(SteadyTime now);
  SteadyTime next_begin() const;  // TakeReady has something by then; max: only after on_progress
  bool has_progress() const { return progress_.load(std::memory_order_relaxed); }  // since TakeReady; any thread
  size_t num_fetching() const { return held_.size(); }
  LinkMeter::Estimate link() const { return link_.estimate(); }  // any thread
  // Ends the threads after their current fetches. TakeReady then returns everything that is left.
  void Stop();

 private:
  void Loop();
  void Fetch(const PrefillJob& job, PromptFetch& fetch);
  void Progress();
  bool ReExamine(const PrefillJob& job, SteadyTime now) const;
  // Reads chunks [first, first + num_chunks) of the prompt, and its segments behind them.
  void Read(const PrefillJob& job, PromptFetch& fetch, size_t num_chunks, SteadyTime deadline);
  void ReadByCost(const PrefillJob& job, PromptFetch& fetch, SteadyTime deadline);
  // Nobody waits for this: what the store has for the receipt, and now and then how fast the link is by now.
  void LookAround(const PrefillJob& job, PromptFetch& fetch, size_t num_chunks, SteadyTime deadline);
  void MeasureLink(std::span<const chunk::ChunkKey> keys, SteadyTime deadline);
  // For `num_chunks` chunks of the prompt's start and the segments behind them.
  FetchTimes TimesOf(const PrefillJob& job, const PromptFetch& fetch, size_t num_chunks) const;
  int64_t BytesOf(const PrefillJob& job, const PromptFetch& fetch, size_t num_chunks) const;
  double HoldFor(const PromptFetch& fetch, const FetchTimes& times, bool answered) const;
  std::vector<WantedSegment> WantedSegments(const PrefillJob& job) const;

  const std::shared_ptr<const Model> model_;
  LocalKv& local_;
  const PrefillMeter& meter_;
  const PrefillEngineOptions& options_;
  const std::function<void()> on_progress_;
  LinkMeter link_;
  const std::shared_ptr<chunk::ChunkStore> store_;  // measured by link_; null: none
  const SegmentFetcher segments_;
  BoundedQueue<std::shared_ptr<PrefillJob>> queue_;
  std::list<std::shared_ptr<PrefillJob>> held_;
  std::atomic<bool> progress_{false};
  bool stopped_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace spl::engine
