// Prefills for one model on one device: prompts in, KV pages (blocks) and first tokens out. No network.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/runtime/canonical_prefill.h"
#include "services/engine/runtime/local_kv.h"
#include "services/engine/runtime/page_budget.h"
#include "services/engine/runtime/prefill_job.h"
#include "services/engine/runtime/prefill_meter.h"
#include "services/engine/runtime/prefill_options.h"
#include "services/engine/runtime/prefill_passes.h"
#include "services/engine/runtime/prefill_request.h"
#include "services/engine/runtime/prompt_fetcher.h"
#include "services/engine/runtime/prompt_harvest.h"
#include "services/engine/runtime/prompt_queue.h"

namespace spl::engine {

// Owns one engine thread, fetch threads and the threads of its publisher. Submit, Publish and load may be called from
// any thread. PromptQueue orders the prompts; PageBudget decides what is evicted for them. Segments are computed in the
// background only while there are no prompts, and stop before the next layer when one arrives.
class PrefillEngine {
 public:
  // `pool` views memory that outlives the engine. With options.shared it is the shared pool's memory.
  static absl::StatusOr<std::unique_ptr<PrefillEngine>> Create(std::shared_ptr<const Model> model,
                                                               const KvPartitions& pool,
                                                               const PrefillEngineOptions& options);
  ~PrefillEngine();  // Stop() must have been called

  // InvalidArgument: the prompt or a sampling field (with both numbers if it is too long for context or pool).
  // ResourceExhausted: the queue is full. Unavailable: the engine is stopping. on_done does not run if Submit fails.
  absl::Status Submit(PrefillRequest request);
  // Computes the context exactly, makes its segments local sources, puts their chunks into the store and waits for it.
  // Whole pages of its start may come from the local prefix index, but never copies of segments. InvalidArgument: as
  // Submit, or no segments. FailedPrecondition: no store. ResourceExhausted: too many Publish calls, or the queue is
  // full. Later errors arrive in on_done: Unavailable, the store did not answer; ResourceExhausted, its quota or room;
  // or the store's own error.
  absl::Status Publish(PublishRequest request);
  // Tells the engine that pages were given back or a request was cancelled.
  void Wake();

  PrefillLoad load() const;
  void WaitIdle(SteadyTime deadline) const;  // until no request is queued or running, or until the deadline
  LinkMeter::Estimate store_link() const { return fetcher_.link(); }  // what was measured of the store
  CanonicalStats canonical_stats() const { return canonical_.stats(); }
  SegmentIndex::Stats segment_stats() const { return local_.segments.stats(); }
  SessionTable::Stats session_stats() const { return local_.sessions.stats(); }
  size_t CountCachedLeading(std::span<const chunk::ChunkKey> keys) const { return local_.prefixes.CountLeading(keys); }
  const PagePool& pool() const { return pool_; }
  const Model& model() const { return *model_; }
  int64_t max_prompt_tokens() const;
  int64_t max_cached_tokens() const;  // whose KV fits into all pages

  // Ends every request with Unavailable and joins the threads. Idempotent.
  void Stop();

 private:
  using Job = PrefillJob;

  PrefillEngine(std::shared_ptr<const Model> model, const KvPartitions& pool, const PrefillEngineOptions& options);
  absl::Status Enqueue(std::shared_ptr<Job> job);
  void RunLoop();
  void CollectInbox();
  void DropDead();
  void AdmitWaiting();
  bool Admit(const std::shared_ptr<Job>& job);
  // Pages that must be free to admit a prompt that needs `num_pages`. Nullopt: it may not begin yet.
  std::optional<int64_t> RoomFor(int64_t num_pages) const;
  bool PagesWillReturn();
  void RunStep();
  void FailAll(std::span<const std::shared_ptr<Job>> batch, const absl::Status& failed);
  bool CanStepCanonical() const;
  void StepCanonical();
  bool WorkArrived() const;
  void FinishJob(const std::shared_ptr<Job>& job, const absl::Status& status);
  void EndPublish(const Job& job, const absl::Status& status, const PublishTally& stored);
  void CountFinished();
  bool WaitForQuiet(SteadyTime until) const;
  void NotePages(bool are_short);
  bool IsShortOfPages() const;

  std::shared_ptr<const Model> model_;
  std::unique_ptr<PagePool> own_pool_;  // null: the pool is shared
  PagePool& pool_;
  LocalKv local_;
  const PrefillEngineOptions options_;
  PrefillMeter meter_;
  std::unique_ptr<ParallelExecutor> executor_;
  std::unique_ptr<PrefillPasses> passes_;

  mutable std::mutex mutex_;  // guards all up to the next blank line
  std::condition_variable wake_;
  mutable std::condition_variable idle_;
  bool woken_ = false;
  bool stopping_ = false;
  bool short_of_pages_ = false;              // a prompt waits for pages
  std::vector<std::shared_ptr<Job>> inbox_;  // submitted, not yet seen by the engine thread
  size_t num_jobs_ = 0;                      // not finished
  size_t num_publishes_ = 0;                 // Publish calls whose callers are waiting

  PageBudget budget_;
  // Engine thread only.
  PromptQueue queue_;
  CanonicalPrefill canonical_;  // runs only while there is nothing else
  PromptHarvest harvest_;
  PromptFetcher fetcher_;
  std::thread engine_thread_;
};

}  // namespace spl::engine
