// Restores local heads while a sequence is decoded (docs/methods/redknot.md and docs/methods/splice.md). From time to
// time a step computes a lower bound of the attention that each head misses. A head that misses too much gets its
// dropped KV from the prefill worker, which keeps it under a lease, and has full visibility from then on.
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
  // e- above which a head is restored, but at least 1.25 times the head's value in profiling (its edge_mass_q99). Below
  // 0: every head is restored, whatever profiling saw.
  double threshold = 0.15;
  double share = kRestoreShareMax;  // share of the local heads, including those restored during prefill
};

// InvalidArgument: the field, its value and its range.
absl::Status ValidateHeadRestoreOptions(const HeadRestoreOptions& options);
// The same, and whether the request can be served. InvalidArgument: the selector is not head_classes, so that its
// choices would be lost. Unimplemented: the host cannot read keys and queries.
absl::Status CheckHeadRestore(const HeadRestoreOptions& options, const TokenSelector& selector, const Model& model);

// Pages to hold the KV that holes left out. Owns one share of each page until it is taken. One thread at a time may
// take; the last owner destroys it.
struct HeadPages {
  HeadPages(PagePool& pool, std::vector<int32_t> streams, std::vector<std::vector<int32_t>> pages)
      : pool(pool), streams(std::move(streams)), pages(std::move(pages)) {}
  ~HeadPages();
  HeadPages(const HeadPages&) = delete;
  HeadPages& operator=(const HeadPages&) = delete;

  PagePool& pool;
  const std::vector<int32_t> streams;       // ascending
  std::vector<std::vector<int32_t>> pages;  // for each stream, in order; emptied by the one who takes them
};

// A source of the KV that the holes of one prompt's local heads leave out. Owned by the requests that use it. Called on
// the engine thread.
class HeadSource {
 public:
  virtual ~HeadSource() = default;
  // Summaries of every head that can be restored: of exactly the pages of its hole.
  virtual std::span<const KeySummary> summaries() const = 0;
  // False: its KV is gone for good.
  virtual bool alive() const = 0;
  // Fills the pages and compares their checksums. Never blocks. `done` runs once on any thread, within a bounded time:
  // OK, the pages are filled; NotFound, the source is not alive any more; otherwise the cause of the failure. After a
  // failure a write may still arrive: the source keeps `pages` until none can.
  virtual void Fetch(std::shared_ptr<HeadPages> pages, std::function<void(absl::Status)> done) = 0;
};

// Sums for one request, over all of its continuations.
struct HeadRestoreReport {
  int64_t restored = 0;
  // Heads that should have been restored but stay local: the lease had ended, there were no pages, or the fetch failed.
  int64_t missed_lease = 0, missed_pages = 0, missed_fetch = 0;
  int64_t missed() const { return missed_lease + missed_pages + missed_fetch; }
  // First output token of continuation 0 (counted from 0, the first one of prefill) that was computed with restored
  // heads. -1: none.
  int64_t first_token = -1;
  bool operator==(const HeadRestoreReport&) const = default;
};

// Probes and fetches of one continuation. Engine thread only. A head that could not be restored stays local for good.
class HeadRestorer {
 public:
  // `kv` has not been decoded from. Its holes are frozen here, and released when nothing more can be restored. `map`
  // and `config` are the model's and outlive this.
  HeadRestorer(const HeadRestoreOptions& options, const ModelConfig& config, const HeadClassMap& map,
               std::shared_ptr<HeadSource> source, SequenceKv& kv, HeadRestoreReport& report);

  // Apply and BeginStep are called before each step, in this order. Apply puts arrived pages into their place. True:
  // heads became global, and the selector must be replaced.
  bool Apply(SequenceKv& kv, int64_t output_token);
  HeadProbe* BeginStep();  // null: this step has no probe
  // Called after a step with a probe: chooses heads and fetches their pages. `keep_free`: pages of each rank that it
  // must not take.
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
  std::shared_ptr<HeadSource> source_;  // null when nothing more can be restored
  HeadRestoreReport& report_;
  std::vector<float> thresholds_;  // by stream
  HeadProbe probe_;                // probes the heads that may still be restored
  int32_t left_ = 0;               // how many heads may still be restored
  int64_t steps_ = 0;
  bool probing_ = false;
  bool frozen_ = true;
  std::shared_ptr<Fetch> fetch_;  // the one under way; null: none
  std::shared_ptr<HeadPages> pages_;
};

}  // namespace spl::engine
