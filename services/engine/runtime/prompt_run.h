// One prompt on its way through the stages of its policy: which rows the next pass computes, and what a finished pass
// means. Used by whoever owns the executor's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/cache/segment_source.h"
#include "services/engine/execution/observers/head_restore.h"
#include "services/engine/execution/observers/sparse_ffn.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/runtime/prefill_stats.h"

namespace spl::engine {

class PromptRun {
 public:
  // `kv` has pages for all tokens and the KV of its first num_tokens() positions, fewer than all. `hits` ascend, are
  // disjoint and lie behind those; they are copied by Begin. All arguments outlive the run. KV from the first hit on is
  // marked approximate.
  PromptRun(std::span<const int32_t> tokens, std::vector<SegmentHit> hits, SequenceKv& kv, RecoveryPolicy& policy);

  // Copies the hits and makes what the first stage needs. Once, before the first pass.
  absl::Status Begin(ParallelExecutor& executor);

  // What the next pass runs; passes that share a batch run the same layers.
  PassLayers layers() const {
    return {stage_.layers, stage_.keys_only_last, stage_.keep_hidden,
            !stage_.keep_hidden && stage_.layers.end < num_layers_, stage_.whole};
  }
  // No other prompt may share the pass, which has all of the room: its scores would depend on the company, or its
  // policy asks for it.
  bool alone() const { return scores() || policy_.runs_alone(layout_); }
  // The next pass, of at most `room` rows, or of a whole span whatever the room. Valid until Finish. No tokens: the
  // room is too small for a sensible slice.
  PrefillSlice Next(int32_t room);

  // Pages [first, end) of the pass's layers become final in the pass that Next described: nothing later writes them. A
  // pass that was described and did not run is described anew by the next Next, with the same pages.
  struct FinalPages {
    int32_t first = 0, end = 0;
  };
  FinalPages final_pages() const { return final_; }

  // The pass is complete. Chooses the rows of the next stage when the stage is.
  absl::Status Finish(ParallelExecutor& executor);

  bool done() const { return done_; }
  // Rows in this stage and share of the layers, plus about what later stages will add: in rows through all layers.
  double remaining_work() const;
  double pass_work() const;  // of the pass that Next described

  // Fills in all that the run knows: `exact`, aligned and computed tokens from the start, the rest once it is done.
  void Report(PrefillStats& stats) const;

  bool exact() const { return exact_; }
  bool reuses() const { return !layout_.reused.empty(); }
  int64_t reused_tokens() const { return CountOf(layout_.reused); }
  // Reused tokens whose KV above the dense layers was computed afresh; known when done.
  int64_t recomputed_tokens() const { return CountOf(recomputed_rows_) + recomputed_dropped_; }
  const ReuseLayout& layout() const { return layout_; }
  // Copies whose summary (keys, or local query and attended tokens) no earlier prompt had left with their source.
  int64_t summaries_computed() const { return summaries_computed_; }
  // Of a policy that leaves tokens out, when done: what each layer keeps of the prompt, [num_layers]; empty:
  // everything.
  std::span<const PositionRanges> kept() const { return policy_.kept(); }
  // Of a policy that drops tokens and moves the others together (PrefillStage::only): what is left, in the prompt's own
  // positions; empty: everything. layout() and the sequence's num_tokens() are of these; its pages stay as many.
  const PositionRanges& only() const { return only_; }
  // Kept tokens of the copies as a share of them, over all layers.
  double kept_share() const;
  // Of a policy with head classes, when done: heads that were restored, ascending; rows through feed-forward as a share
  // of all.
  std::vector<int32_t> restored_heads() const;
  double ffn_share() const;
  // Of a policy that chooses lines, over all ranks; `heads` is 0 when it did not.
  LineReport lines() const;

 private:
  bool scores() const { return stage_.score.kind != ScoreKind::kNone; }
  absl::Status Enter(ParallelExecutor& executor, PrefillStage stage);
  absl::Status Compact(ParallelExecutor& executor, const PositionRanges& only);
  absl::StatusOr<std::vector<int32_t>> Selected(ParallelExecutor& executor) const;
  int32_t RowAt(int64_t index) const;
  // Observers of the stage, of every rank.
  absl::Status MakeObservers(const ParallelExecutor& executor);
  std::unique_ptr<LayerObserver> MakeScoring(size_t rank) const;
  std::unique_ptr<LayerObserver> MakeQueryMeans(size_t rank);
  absl::Status GiveSummaries(const Model& model);
  absl::Status GiveQueryMeans(ParallelExecutor& executor);
  absl::StatusOr<std::vector<std::vector<int32_t>>> ReadAttended(ParallelExecutor& executor);

  std::span<const int32_t> tokens_;  // the prompt, or those that are left of it
  std::vector<int32_t> left_tokens_;
  PositionRanges only_;
  const std::vector<SegmentHit> hits_;
  SequenceKv& kv_;
  RecoveryPolicy& policy_;
  const int32_t num_layers_;
  ReuseLayout layout_;
  bool exact_ = false;          // as a plain prefill
  int64_t aligned_tokens_ = 0;  // copied by Begin
  PrefillStage stage_;
  int64_t num_rows_ = 0;            // of the stage
  int64_t next_row_ = 0;            // of the stage
  PositionRanges recomputed_rows_;  // of copies, through all layers
  int64_t recomputed_dropped_ = 0;  // and of those that are not left
  double left_share_ = 1;           // of the copies' tokens
  int64_t summaries_computed_ = 0;
  bool done_ = false;
  std::vector<HiddenStates> hidden_;     // [num_ranks], or none
  ParallelExecutor::RankScores scores_;  // [num_ranks] while the stage scores

  std::vector<double> query_sums_;          // [query_means][num_layers, q_size] of the stage
  ParallelExecutor::RankScores attention_;  // of the stage's attention_to, one behind the other: [num_ranks], or none
  std::vector<LineReport> line_reports_;    // [num_ranks], once a stage was whole
  // [num_ranks], or none: of all passes of a policy that is not exact.
  std::vector<std::unique_ptr<HeadRestore>> restores_;
  std::vector<std::unique_ptr<SparseFfn>> sparse_ffns_;
  std::vector<std::unique_ptr<LayerObserver>> stage_observers_;
  std::vector<ObserverList> observers_;  // [num_ranks]: these, for the stage

  // The pass under way.
  std::vector<int32_t> pass_tokens_, pass_positions_;
  FinalPages final_;
  int32_t final_end_ = 0;  // pages in front of it were final before
};

}  // namespace spl::engine
