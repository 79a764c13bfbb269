// Restoring local heads while a sequence is decoded (docs/methods/redknot.md and docs/methods/splice.md): now and then
// a step asks how much the heads certainly miss; whoever misses too much gets its dropped KV from the prefill worker,
// which keeps it under a lease, and sees everything from then on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/engine/cache/key_summary.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/execution/executor.h"
#include "services/engine/selection/token_selector.h"

namespace spl::engine {

struct HeadRestoreOptions {
  bool enabled = false;
  int32_t interval = 32;  // steps between two probes
  // e- above which a head is restored, but at least 1.25 times what profiling saw of the head (its edge_mass_q99);
  // below 0: every head is, whatever profiling saw.
  double threshold = 0.15;
  double share = kRestoreShareMax;  // of the local heads, those that were restored during prefill included
};

// InvalidArgument: the field, its value and its range.
absl::Status ValidateHeadRestoreOptions(const HeadRestoreOptions& options);
// The same, and whether it can be done. InvalidArgument: the selector is another than head_classes, whose choices would
// be lost. Unimplemented: keys and queries lie where the host does not read them.
absl::Status CheckHeadRestore(const HeadRestoreOptions& options, const TokenSelector& selector, const Model& model);

// Room for what holes have left out. Owns one share of each page until it is taken. One thread at a time may take; the
// last owner destroys it.
struct HeadPages {
  HeadPages(PagePool& pool, std::vector<int32_t> streams, std::vector<std::vector<int32_t>> pages)
      : pool(pool), streams(std::move(streams)), pages(std::move(pages)) {}
  ~HeadPages();
  HeadPages(const HeadPages&) = delete;
  HeadPages& operator=(const HeadPages&) = delete;

  PagePool& pool;
  const std::vector<int32_t> streams;       // ascending
  std::vector<std::vector<int32_t>> pages;  // of each stream, in order; emptied by who takes them
};

// Somebody who has what the holes of one prompt's local heads leave out. Outlives nothing: owned by the requests that
// use it. Called on the engine thread.
class HeadSource {
 public:
  virtual ~HeadSource() = default;
  // Of every head that can be had: exactly the pages of its hole.
  virtual std::span<const KeySummary> summaries() const = 0;
  // False: what it had is gone for good.
  virtual bool alive() const = 0;
  // Fills the pages and compares their checksums. Never blocks. `done` runs once on any thread, within a bounded time:
  // OK, the pages are there; NotFound, the source is not alive any more; or why it failed. When it has failed a write
  // may still be on its way: the source keeps `pages` until none can be.
  virtual void Fetch(std::shared_ptr<HeadPages> pages, std::function<void(absl::Status)> done) = 0;
};

// Of one request, all of its continuations together.
struct HeadRestoreReport {
  int64_t restored = 0;
  // Heads that should have been restored and stay local: the lease had ended, no pages were free, or the fetch failed.
  int64_t missed_lease = 0, missed_pages = 0, missed_fetch = 0;
  int64_t missed() const { return missed_lease + missed_pages + missed_fetch; }
  // Of continuation 0, the output token (counted from 0, the first one of prefill) that was the first to be computed
  // with restored heads; -1: none.
  int64_t first_token = -1;
  bool operator==(const HeadRestoreReport&) const = default;
};

// One continuation's probes and fetches. Engine thread only. A head that was to be restored and could not be stays
// local for good.
class HeadRestorer {
 public:
  // `kv` has not been decoded from; its holes are frozen here, and thawed when nothing more can be restored. `map` and
  // `config` are the model's and outlive this.
  HeadRestorer(const HeadRestoreOptions& options, const ModelConfig& config, const HeadClassMap& map,
               std::shared_ptr<HeadSource> source, SequenceKv& kv, HeadRestoreReport& report);

  // In front of each step, in this order. Puts what has arrived into its place: true when heads became global, the
  // selector is then another.
  bool Apply(SequenceKv& kv, int64_t output_token);
  HeadProbe* BeginStep();  // null: this step is not asked
  // Behind a step with a probe: chooses heads and asks for them. `keep_free`: pages of each rank that are not taken.
  void EndStep(SequenceKv& kv, std::span<const int64_t> keep_free);

 private:
  struct Fetch {
    std::mutex mutex;  // guards all below
    bool done = false;
    absl::Status status;
  };
  void Miss(int64_t HeadRestoreReport::*reason, int32_t stream);
  bool Start(SequenceKv& kv, const std::vector<int32_t>& streams, std::span<const int64_t> keep_free);

  const HeadRestoreOptions options_;
  std::shared_ptr<HeadSource> source_;  // null once nothing more can be restored
  HeadRestoreReport& report_;
  std::vector<float> thresholds_;  // by stream
  HeadProbe probe_;                // asks the heads that may still be restored
  int32_t left_ = 0;               // how many of them
  int64_t steps_ = 0;
  bool probing_ = false;
  bool frozen_ = true;
  std::shared_ptr<Fetch> fetch_;  // under way; null: none
  std::shared_ptr<HeadPages> pages_;
};

}  // namespace spl::engine
