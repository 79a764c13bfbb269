// The prefill side of one model on one device: prompts in, KV pages and first tokens out. No network.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/base/bounded_queue.h"
#include "services/base/trace.h"
#include "services/engine/cache/prefix_index.h"
#include "services/engine/cache/segment_index.h"
#include "services/engine/cache/session_table.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/model/prefill_cost.h"
#include "services/engine/recovery/reuse_options.h"
#include "services/engine/runtime/canonical_prefill.h"
#include "services/engine/runtime/chunk_publisher.h"
#include "services/engine/runtime/device_lost.h"
#include "services/engine/runtime/prompt_run.h"
#include "services/engine/runtime/sample_rows.h"
#include "services/engine/runtime/sampler.h"
#include "services/engine/runtime/segment_fetcher.h"
#include "services/engine/runtime/step_turns.h"

namespace spl::engine {

using SteadyTime = std::chrono::steady_clock::time_point;
using CancelFlag = std::shared_ptr<std::atomic<bool>>;

// Pages [first_page, first_page + num_pages) of every KV head of `layer` are final (behind `fence`), but for those that
// hold nothing of `kept`, which hold anything and are nobody's to send. `kv` keeps them alive.
struct LayerReady {
  std::shared_ptr<const SequenceKv> kv;
  int32_t layer = 0;
  int32_t first_page = 0;
  int32_t num_pages = 0;
  std::shared_ptr<const kernels::Fence> fence;  // wait for it before reading the pages; null: they are written
  std::shared_ptr<const KeptTokens> kept;       // of PrefillOutcome; null: everything
};

// Tokens: prompt = cached + aligned + computed.
struct PrefillStats {
  std::string policy;
  bool exact = false;  // whether the KV is that of a plain prefill
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;      // leading tokens that had KV: local pages, chunk store or the conversation's own
  int64_t session_tokens = 0;     // of these, from the last turn of the conversation
  int64_t stored_tokens = 0;      // of these, from the chunk store
  int64_t aligned_tokens = 0;     // copies of segments, turned to their new positions
  int64_t recomputed_tokens = 0;  // of these, computed afresh in the layers above the dense ones
  int64_t computed_tokens = 0;    // neither cached nor aligned
  int64_t fetched_bytes = 0;
  int64_t restored_heads = 0;      // local heads that saw everything again
  double ffn_share = 1;            // of rows times layers, what ran through feed-forward
  double kept_share = 1;           // of the aligned tokens times layers, what the policy keeps
  int64_t summaries_computed = 0;  // segments whose summary no earlier prompt had left (PromptRun)
  LineReport lines;                // of loopserve and minference; without heads: no lines were chosen
  // Disjoint, and together all of the time from Submit until the last slice is done: waiting for pages, a fetch thread
  // and the engine; looking for KV here; bringing chunks from the store; computing, slices of other prompts in between.
  double queue_s = 0, lookup_s = 0, fetch_s = 0, prefill_s = 0;
  // When they began: the wait, the lookup, the fetch (epoch: there was none), computing.
  SteadyTime submitted{}, looked_up{}, fetched{}, started{};
};

struct PrefillOutcome {
  std::vector<SampledToken> first_tokens;  // one per fork; empty unless OK
  std::shared_ptr<const SequenceKv> kv;    // keeps the pages until the push is done; null if none were allocated
  PrefillStats stats;
  std::vector<float> first_logits;  // [vocab_size] behind the prompt; empty unless asked for
  // Local heads that saw everything again, layer * num_kv_heads + head, ascending.
  std::vector<int32_t> restored_heads;
  std::shared_ptr<const KeptTokens> kept;  // what of the prompt is to be decoded with; null: everything
  // Not empty: `kv` is of a shorter prompt, of these positions alone, one behind the other.
  PositionRanges only;
};

// A part of a prompt that may be found in, and is offered to, the segment index.
struct ReuseSpan {
  PositionRange range;
  chunk::Digest namespace_key{};
  bool frozen = false;  // of a knowledge base: its local source is kept beyond ordinary ones
  // Callers share the namespace: the segment's source was computed by itself and therefore holds nothing of the text
  // that another caller has in front of it.
  bool shared = false;
};

struct PrefillRequest {
  std::string id;
  std::vector<int32_t> tokens;
  int64_t num_output_tokens = 0;  // tail of `tokens` that was generated earlier (a resumed continuation)
  SamplingParams sampling;
  ReuseOptions reuse;  // policy "" or "auto": sparsex where segments are marked or looked for, else exact
  chunk::Digest namespace_key{};
  std::string session;              // the conversation that this is a turn of; empty: none (SessionTable)
  chunk::Digest session_owner{};    // the caller (SessionId)
  std::vector<ReuseSpan> segments;  // ascending, disjoint
  // Text outside of `segments` may be found, too, under namespace_key.
  bool reuse_auto = false;
  bool publish = true;      // false: nothing of it is kept for later prompts, here or in the store
  bool background = false;  // behind everything that is not
  // Of tokens without any KV; a prompt with more ends with ResourceExhausted before it is computed. 0: any number.
  int64_t max_computed_tokens = 0;
  bool return_first_logits = false;
  TraceContext fetch_trace;  // of calls to the store (CurrentTrace)
  SteadyTime deadline = SteadyTime::max();
  CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
  // Both must not block and run on the engine thread, or while that waits on a thread of its executor. on_layer runs
  // for cached pages first, then for every slice and layer in order. on_done runs exactly once, also after an error,
  // and last.
  std::function<void(const LayerReady&)> on_layer;
  std::function<void(absl::Status, PrefillOutcome)> on_done;
};

struct PublishOutcome {
  PublishTally stored;  // also after an error: what the store has acknowledged stays there
  PrefillStats stats;
};

// A context that is computed exactly so that its segments can be stored: documents of a knowledge base.
struct PublishRequest {
  std::string id;
  std::vector<int32_t> tokens;
  std::vector<ReuseSpan> segments;  // what is stored of it; at least one, ascending, disjoint
  chunk::PutOptions put;            // pin and durability of the stored chunks
  SteadyTime deadline = SteadyTime::max();
  CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
  // Exactly once, on the engine thread or one of its publisher; must not block.
  std::function<void(absl::Status, const PublishOutcome&)> on_done;
};

struct PrefillEngineOptions {
  ExecutorOptions executor{.max_rows = 512};  // a slice: other prompts wait at most one; cancelling one layer of it
  size_t max_queued = 256;
  size_t max_concurrent = 16;  // prompts that hold pages at one time
  bool prefix_cache = true;
  bool publish = true;  // new exact chunks to the store
  // Quantized copies beside the chunks, a fifth of their bytes more: of what Publish is given, and of the segments of
  // prompts whose policy reads such.
  bool quantize_published = true;
  // Frozen sources go last, unless they hold more than this share of the pool's pages: then they go first.
  double frozen_share = 0.9;
  // Of the pool's pages, what conversations may keep between their turns, and for how long after the last one.
  double session_share = 0.5;
  std::chrono::milliseconds session_lease{600'000};
  std::shared_ptr<chunk::ChunkStore> store;  // null: none
  std::chrono::milliseconds store_timeout{2000};
  int num_fetch_threads = 4;      // prompts that are fetched at one time: a large one does not keep small ones waiting
  size_t max_publish_queued = 8;  // prompts waiting to be published; more are not published
  size_t max_publish_calls = 64;  // Publish calls under way; more are refused
  std::chrono::milliseconds publish_timeout{30000};  // of one put of a Publish call, the store's disk included
  // While nothing is queued or running: compute segments without a source by themselves, for later requests.
  bool canonical_prefill = true;
  size_t max_canonical_queued = 64;  // segments that wait for that
  // Gives back pages that are kept for somebody who can do without; false: there are none. Asked for requests, on any
  // of the engine's threads, before text that was meant to stay is dropped; null: nobody keeps any.
  std::function<bool()> reclaim;
  // Of chunks of prefixes and of segments that come and go; their keys are never the same. On any of the engine's
  // threads; null: nobody wants to know.
  PrefixIndex::Observer on_cache_change;
  std::shared_ptr<StepTurns> turns;  // of a device that is shared with another engine; null: it is not
  OnDeviceLost on_device_lost = EndProcessOnDeviceLost;
};

struct PrefillLoad {
  size_t queued_requests = 0;
  int64_t queued_tokens = 0;  // still to compute, running ones included
  double tokens_per_s = 0;    // smoothed; the warm-up gives the first value
};

// Owns one engine thread, fetch threads and the threads of its publisher. Submit, Publish and load may be called
// from any thread. Order: the request with the fewest tokens left runs first, but one that has waited kMaxDelay runs
// before younger ones. What is published comes behind requests, unless it has waited several times as long. Segments
// are computed in the background only while there is neither, and stop in front of the next layer when something comes.
class PrefillEngine {
 public:
  // `pool` views memory that outlives the engine.
  static absl::StatusOr<std::unique_ptr<PrefillEngine>> Create(std::shared_ptr<const Model> model,
                                                               const KvPartitions& pool,
                                                               const PrefillEngineOptions& options);
  ~PrefillEngine();  // Stop() must have been called

  // InvalidArgument: the prompt or a sampling field (both numbers when it is too long for context or pool).
  // ResourceExhausted: the queue is full. Unavailable: stopping.
  // on_done does not run when Submit fails.
  absl::Status Submit(PrefillRequest request);
  // Computes the context, with whole pages of its start from the local prefix index where they are, never with copies
  // of segments; makes its segments local sources; puts their chunks and waits for the store. InvalidArgument: as
  // Submit, or no segments. FailedPrecondition: no store. ResourceExhausted: too many Publish calls, or the queue is
  // full. Later errors come by on_done: Unavailable, the store did not answer; ResourceExhausted, its quota or room; or
  // its own.
  absl::Status Publish(PublishRequest request);
  // Pages were given back or a request was cancelled: look again.
  void Wake();

  PrefillLoad load() const;
  void WaitIdle(SteadyTime deadline) const;  // until no request is queued or running
  // Until nothing is to be computed in the background either. False: the deadline passed before.
  bool WaitBackgroundIdle(SteadyTime deadline) const;
  CanonicalStats canonical_stats() const { return canonical_.stats(); }
  SegmentIndex::Stats segment_stats() const { return segments_.stats(); }
  SessionTable::Stats session_stats() const { return sessions_.stats(); }
  size_t CountCachedLeading(std::span<const chunk::ChunkKey> keys) const { return index_.CountLeading(keys); }
  const PagePool& pool() const { return pool_; }
  const Model& model() const { return *model_; }
  int64_t max_prompt_tokens() const;

  // Ends every request with Unavailable and joins the threads. Idempotent.
  void Stop();

 private:
  struct Job;

  PrefillEngine(std::shared_ptr<const Model> model, const KvPartitions& pool, const PrefillEngineOptions& options);
  absl::Status WarmUp();
  absl::Status CheckPrompt(std::span<const int32_t> tokens, std::span<const ReuseSpan> segments) const;
  absl::Status Enqueue(std::shared_ptr<Job> job);
  void RunLoop();
  void CollectInbox();
  void DropDead();
  void AdmitWaiting();
  bool Admit(const std::shared_ptr<Job>& job);
  void AppendKept(Job& job, SequenceKv& kv);
  bool MakeRoom(int64_t num_pages, bool may_drop_frozen);
  bool PagesWillReturn();
  void FetchLoop();
  void Fetch(Job& job);
  void FetchPrefix(Job& job, SteadyTime deadline);
  static void KeepLocalSummary(const Job& job, const PositionRange& segment, const SegmentSource& source);
  void OfferSummaries(const Job& job);
  void OfferQuantized(const Job& job);
  void OfferSegment(std::shared_ptr<const SegmentSource> source, std::vector<chunk::ChunkKey> keys,
                    const chunk::Digest& namespace_key, bool quantized);
  std::shared_ptr<const SegmentSource> WholeSourceOf(const Job& job, const ReuseSpan& segment);
  std::vector<WantedSegment> WantedSegments(const Job& job) const;
  void RunStep();
  std::vector<std::shared_ptr<Job>> ChooseBatch();
  absl::Status StartRun(Job& job);
  std::vector<SegmentHit> FindSegments(const Job& job);
  void FailAll(const std::vector<std::shared_ptr<Job>>& batch, const absl::Status& failed);
  void Index(const Job& job);
  void KeepSession(const Job& job);
  void NoteMissingSegments(const Job& job);
  bool CanStepCanonical() const;
  void StepCanonical();
  bool WorkArrived() const;
  void FinishJob(const std::shared_ptr<Job>& job, const absl::Status& status);
  absl::Status Order(const std::shared_ptr<Job>& job);
  void EndPublish(const Job& job, const absl::Status& status, const PublishTally& stored);
  // Of prompts whose logits the executor has, in their order.
  absl::Status SampleFirstTokens(std::span<const std::shared_ptr<Job>> jobs);
  void UpdateLoad(Job& job, double work);
  void UpdateRate(double work, double cost, double seconds);
  double RecomputeSeconds(int64_t first, int32_t count) const;

  std::shared_ptr<const Model> model_;
  PagePool pool_;
  PrefixIndex index_;
  SegmentIndex segments_;
  SessionTable sessions_;
  const PrefillEngineOptions options_;
  const PrefillCost cost_;
  std::unique_ptr<ParallelExecutor> executor_;
  RowSampler row_sampler_;

  mutable std::mutex mutex_;  // guards all up to the next blank line
  std::condition_variable wake_;
  mutable std::condition_variable idle_;
  bool woken_ = false;
  bool stopping_ = false;
  std::deque<std::shared_ptr<Job>> inbox_;    // submitted
  std::deque<std::shared_ptr<Job>> fetched_;  // back from the fetch thread
  size_t num_jobs_ = 0;                       // not finished
  size_t num_publishes_ = 0;                  // of these, Publish calls
  int64_t queued_tokens_ = 0;
  double tokens_per_s_ = 0;
  double cost_per_s_ = 0;  // in units of cost_

  // Engine thread only.
  std::deque<std::shared_ptr<Job>> waiting_;  // no pages yet
  std::list<std::shared_ptr<Job>> running_;
  size_t num_fetching_ = 0;
  CanonicalPrefill canonical_;                               // under way only while nothing else is
  std::vector<std::weak_ptr<const SequenceKv>> handed_out_;  // with on_done: whoever has them gives them back

  const SegmentFetcher fetcher_;
  BoundedQueue<std::shared_ptr<Job>> fetch_queue_;
  std::unique_ptr<ChunkPublisher> publisher_;  // null without a store
  std::thread engine_thread_;
  std::vector<std::thread> fetch_threads_;
};

}  // namespace spl::engine
