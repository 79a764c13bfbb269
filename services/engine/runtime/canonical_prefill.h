// Segments that requests named and that have no source (canonical_queue.h), computed by themselves while an engine has
// nothing else to do.
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
  size_t num_queued = 0;       // the one being computed included
  bool running = false;        // one is being computed
  uint64_t num_computed = 0;   // and made sources
  uint64_t num_tokens = 0;     // of these
  uint64_t num_cancelled = 0;  // runs that a request ended; they are tried again
  uint64_t num_dropped = 0;    // for want of room in the queue, or of pages
};

struct CanonicalPrefillOptions {
  size_t max_queued = 64;
  // Asked for free pages before they are taken.
  std::function<bool(int64_t num_pages)> make_room;
  // A segment has a source now, which nobody had before.
  std::function<void(const CanonicalTask& task, const std::shared_ptr<const SegmentSource>& source)> on_computed;
};

// One thread, but for stats(). Takes pages while a segment is under way.
class CanonicalPrefill {
 public:
  // `pool` and `segments` outlive it.
  CanonicalPrefill(std::shared_ptr<const Model> model, PagePool& pool, SegmentIndex& segments,
                   CanonicalPrefillOptions options);

  // What has a source by the time of its turn is not computed again.
  void Add(CanonicalTask task);
  bool has_work() const { return run_.has_value() || queue_.size() > 0; }

  // What a step computed, for the engine's rates: rows times layers, and by PrefillCost; and how long that took.
  struct Pass {
    double work = 0, cost = 0, seconds = 0;
  };
  // One slice of the segment under way, or of the next one; nothing when there is no room for any. `stop` is asked in
  // front of each layer: true ends the segment (Cancel). Errors are the executor's, and drop the segment.
  absl::StatusOr<Pass> Step(ParallelExecutor& executor, const std::function<bool()>& stop);
  // Somebody waits: the pages go back, the segment's turn comes again.
  void Cancel();
  // Of everything that waits.
  void DropQueued();
  // Gives the pages back; nothing is computed any more.
  void Stop() { run_.reset(); }

  CanonicalStats stats() const;  // any thread

 private:
  // From position 0, with nothing in front.
  struct Run {
    CanonicalTask task;
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
  std::optional<Run> run_;  // under way

  mutable std::mutex mutex_;
  CanonicalStats stats_;  // guarded by mutex_
};

}  // namespace spl::engine
