// Fetches chunks of waiting prompts from the chunk store, on threads of its own.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "services/base/bounded_queue.h"
#include "services/engine/runtime/local_kv.h"
#include "services/engine/runtime/page_budget.h"
#include "services/engine/runtime/prefill_job.h"
#include "services/engine/runtime/prefill_options.h"
#include "services/engine/runtime/segment_fetcher.h"

namespace spl::engine {

// A store that fails costs time, never a request. Used by the engine thread, except has_fetched.
class PromptFetcher {
 public:
  using Jobs = std::vector<std::shared_ptr<PrefillJob>>;

  // on_fetched: called when TakeFetched has something; must not block. All references outlive the fetcher.
  PromptFetcher(std::shared_ptr<const Model> model, PagePool& pool, LocalKv& local, PageBudget& budget,
                const PrefillEngineOptions& options, std::function<void()> on_fetched);

  void Start();
  // Takes the prompt if the store may have more of it than this worker, and the queue has room. `num_here`: leading
  // chunks that need not be fetched.
  bool Take(const std::shared_ptr<PrefillJob>& job, size_t num_here);
  Jobs TakeFetched();
  bool has_fetched() const;  // any thread
  size_t num_fetching() const { return num_fetching_; }
  // Ends the threads after their current fetches. TakeFetched then returns everything that is left.
  void Stop();

 private:
  void Loop();
  void Fetch(PrefillJob& job) const;
  void FetchPrefix(PrefillJob& job, SteadyTime deadline) const;
  std::vector<WantedSegment> WantedSegments(const PrefillJob& job) const;

  const std::shared_ptr<const Model> model_;
  LocalKv& local_;
  const PrefillEngineOptions& options_;
  const std::function<void()> on_fetched_;
  const SegmentFetcher segments_;
  BoundedQueue<std::shared_ptr<PrefillJob>> queue_;
  size_t num_fetching_ = 0;
  mutable std::mutex mutex_;
  Jobs fetched_;  // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace spl::engine
