// Computes segments that requests named but that have no source, or one that has seen other text (canonical_queue.h),
// each by itself behind the start of the prompt that named it, while the engine has nothing else to do.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "absl/status/statusor.h"
#include "services/engine/cache/segment_index.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/model/prefill_cost.h"
#include "services/engine/recovery/exact.h"
#include "services/engine/runtime/canonical_queue.h"
#include "services/engine/runtime/prompt_run.h"

namespace spl::engine {

struct CanonicalStats {
  size_t num_queued = 0;       // including the one being computed
  bool running = false;        // one is being computed
  uint64_t num_computed = 0;   // completed: they have sources of their own now
  uint64_t num_tokens = 0;     // tokens of those
  uint64_t num_cancelled = 0;  // runs that a request interrupted; they are tried again
  uint64_t num_dropped = 0;    // no room in the queue, or no pages
};

struct CanonicalPrefillOptions {
  size_t max_queued = 64;
  // Called to get free pages before they are taken.
  std::function<bool(int64_t num_pages)> make_room;
  // Called when a segment got a source that it did not have before.
  std::function<void(const CanonicalTask& task, const std::shared_ptr<const SegmentSource>& source)> on_computed;
};

// One thread, except for stats(). Holds pages while a segment is being computed.
class CanonicalPrefill {
 public:
  // `pool` and `segments` outlive it.
  CanonicalPrefill(std::shared_ptr<const Model> model, PagePool& pool, SegmentIndex& segments,
                   CanonicalPrefillOptions options);

  // Adds a segment. It is not computed if it has a source by the time of its turn; one that replaces, if that source
  // began its prompt.
  void Add(CanonicalTask task);
  bool has_work() const { return run_.has_value() || queue_.size() > 0; }

  // Work of a step, for the engine's rates: rows times layers, the same by PrefillCost, and its duration.
  struct Pass {
    double work = 0, cost = 0, seconds = 0;
  };
  // Runs one slice of the current segment, or of the next one. Does nothing if there are no pages for any. `stop` is
  // called before each layer; true interrupts the segment (Cancel). Errors are the executor's; they drop the segment.
  absl::StatusOr<Pass> Step(ParallelExecutor& executor, const std::function<bool()>& stop);
  // Interrupts the current segment for a request: its pages go back, and it will be tried again.
  void Cancel();
  // Drops all segments that wait.
  void DropQueued();
  // Gives the pages back. Nothing is computed any more.
  void Stop() { run_.reset(); }

  CanonicalStats stats() const;  // any thread

 private:
  // The segment being computed, behind its lead, which begins at position 0.
  struct Run {
    CanonicalTask task;
    std::vector<int32_t> prompt_tokens;  // the lead and the segment
    std::shared_ptr<SequenceKv> kv;
    std::unique_ptr<ExactPolicy> policy;
    std::unique_ptr<PromptRun> prompt;  // last: it refers to the others
  };

  bool Start(ParallelExecutor& executor);
  bool Begin(CanonicalTask task, ParallelExecutor& executor);
  void Finish();
  void Count(const std::function<void(CanonicalStats&)>& change);

  const std::shared_ptr<const Model> model_;
  PagePool& pool_;
  SegmentIndex& segments_;
  const CanonicalPrefillOptions options_;
  const PrefillCost cost_;
  CanonicalQueue queue_;
  std::optional<Run> run_;  // null: none is being computed

  mutable std::mutex mutex_;
  CanonicalStats stats_;  // guarded by mutex_
};

}  // namespace spl::engine
