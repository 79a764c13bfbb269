// Takes one prompt through the stages of its policy: which rows the next pass computes, and what follows from a
// finished pass. Used by the thread that owns the executor.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/engine/cache/segment_source.h"
#include "services/engine/execution/observers/head_restore.h"
#include "services/engine/execution/observers/sparse_ffn.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/runtime/final_pages.h"
#include "services/engine/runtime/prefill_stats.h"
#include "services/engine/runtime/seen_pages.h"

namespace spl::engine {

class PromptRun {
 public:
  // `kv` has pages for all tokens, and the KV of its first num_tokens() positions, which are fewer than all. `hits` are
  // ascending, disjoint and after those positions; Begin copies them. All arguments outlive the run. KV from the first
  // hit on is marked approximate.
  PromptRun(std::span<const int32_t> tokens, std::vector<SegmentHit> hits, SequenceKv& kv, RecoveryPolicy& policy);

  // `layout`: LayoutOf them, for a caller who has it.
  PromptRun(std::span<const int32_t> tokens, std::vector<SegmentHit> hits, ReuseLayout layout, SequenceKv& kv,
            RecoveryPolicy& policy);

  // Copies the hits and allocates memory for the first stage. Once, before the first pass.
  absl::Status Begin(ParallelExecutor& executor);

  // The layers that the next pass runs. Prompts that share a pass run the same layers.
  PassLayers layers() const {
    return {stage_.layers, stage_.keys_only_last, stage_.keep_hidden,
            !stage_.keep_hidden && stage_.layers.end < num_layers_, stage_.whole};
  }
  // Whether no other prompt may share the pass, which then gets all of the rows: its scores would depend on other
  // prompts, or its policy asks for it.
  bool alone() const { return scores() || policy_.runs_alone(layout_); }
  // The next pass, of at most `room` rows; a whole span ignores `room`. Valid until Finish. Without tokens: `room` is
  // too small for a useful slice. whole_pages: the slice ends on a page edge if its rows reach one, so that the page
  // can be sent behind it.
  PrefillSlice Next(int32_t room, bool whole_pages = true);

  // The pages of `layer` that are final: no pass writes them again. kNow: those that no pass must finish: the prefix,
  // copies that are not computed afresh, rows of earlier passes. kWithPass: those of the pass that Next described, too,
  // once it has written K and V of the layer. Gives out each page once for a layer. A policy that leaves tokens out
  // (kept()) may have left a page without a kept token undefined.
  enum class Final : uint8_t { kNow, kWithPass };
  PageRanges TakeFinalPages(int32_t layer, Final when);

  // Called when the pass is complete. If this completes the stage, chooses the rows of the next one.
  absl::Status Finish(ParallelExecutor& executor);

  // Whether the prompt may skip positions that another thread writes: rows of one stage, all of them through all
  // layers, that nobody observes.
  bool may_skip() const;
  int64_t next_position() const { return RowAt(next_row_); }
  // Pages of these positions were written by somebody else, and no pass will compute them: they are final. REQUIRES:
  // may_skip; whole pages.
  void NoteWritten(const PositionRange& written);
  // Skips positions whose KV was written by somebody else, exactly: their pages are final. REQUIRES: may_skip; whole
  // pages from next_position() on, and more positions behind them.
  void Skip(const PositionRange& written);

  bool done() const { return done_; }
  // Remaining work, in rows through all layers: rows of this stage times their share of the layers, plus an estimate of
  // later stages.
  double remaining_work() const;
  double pass_work() const;  // the pass that Next described

  // Fills in everything that the run knows: `exact`, aligned and computed tokens from the start, the rest once it is
  // done.
  void Report(PrefillStats& stats) const;

  bool exact() const { return exact_; }
  bool reuses() const { return !layout_.reused.empty(); }
  int64_t reused_tokens() const { return CountOf(layout_.reused); }
  // Reused tokens whose KV above the dense layers was recomputed. Known when done.
  int64_t recomputed_tokens() const { return CountOf(recomputed_rows_) + recomputed_dropped_; }
  const ReuseLayout& layout() const { return layout_; }
  // Copies whose KV was computed behind other text, at their places in the whole prompt.
  const PositionRanges& foreign_copies() const { return foreign_; }
  // Copies whose summary (keys, or local query and attended tokens) no earlier prompt had stored with their source.
  int64_t summaries_computed() const { return summaries_computed_; }
  // The parts of the prompt that each layer keeps, for a policy that leaves tokens out, when done. [num_layers]; empty:
  // everything.
  std::span<const PositionRanges> kept() const { return policy_.kept(); }
  // Remaining positions of the prompt, for a policy that drops tokens and moves the others together
  // (PrefillStage::only). layout() and the sequence's num_tokens() are then about the shorter prompt; it keeps all of
  // its pages. Empty: everything.
  const PositionRanges& only() const { return only_; }
  // Kept tokens of the copies, as a share of the copies, over all layers.
  double kept_share() const;
  // For a policy with head classes, when done: restored heads, ascending; share of the rows that ran through
  // feed-forward.
  std::vector<int32_t> restored_heads() const;
  double ffn_share() const { return sparse_ffns_.empty() ? 1 : sparse_ffns_[0]->share(); }
  // For a policy that chooses lines: the report over all ranks. `heads` is 0 if no lines were chosen.
  LineReport lines() const;

 private:
  bool scores() const { return stage_.score.kind != ScoreKind::kNone; }
  void NoteRecomputed();
  absl::Status Enter(ParallelExecutor& executor, PrefillStage stage);
  absl::Status Compact(ParallelExecutor& executor, const PositionRanges& only);
  absl::StatusOr<std::vector<int32_t>> Selected(ParallelExecutor& executor) const;
  int32_t RowAt(int64_t index) const;
  PositionRanges RowsFrom(int64_t index) const;  // rows of the stage
  // Pages that are final in the stage's layers when the stage's rows before this one have been computed.
  PageRanges FinalBehindRow(int64_t row) const;
  // Makes the observers of the stage, for every rank.
  absl::Status MakeObservers(ParallelExecutor& executor);
  std::unique_ptr<LayerObserver> MakeScoring(size_t rank) const;
  std::unique_ptr<LayerObserver> MakeQueryMeans(size_t rank);
  absl::Status AlignCopies(ParallelExecutor& executor, std::span<const SegmentHit> hits) const;
  absl::Status GiveSummaries(const Model& model);
  absl::Status GiveQueryMeans(ParallelExecutor& executor);
  absl::StatusOr<std::vector<std::vector<int32_t>>> ReadAttended(ParallelExecutor& executor);

  std::span<const int32_t> tokens_;  // the prompt, or its remaining tokens
  std::vector<int32_t> left_tokens_;
  PositionRanges only_;
  const std::vector<SegmentHit> hits_;
  SequenceKv& kv_;
  RecoveryPolicy& policy_;
  const int32_t num_layers_;
  ReuseLayout layout_;
  bool exact_ = false;          // equal to a plain prefill
  int64_t aligned_tokens_ = 0;  // copied by Begin
  CopiedTokens copied_;         // the same, by context
  PositionRanges foreign_;
  PrefillStage stage_;
  int64_t num_rows_ = 0;            // rows of the stage
  int64_t next_row_ = 0;            // row of the stage
  PositionRanges recomputed_rows_;  // rows of copies, through all layers
  int64_t recomputed_dropped_ = 0;  // those that were dropped afterwards
  RecomputedTokens recomputed_for_;
  double left_share_ = 1;  // share of the copies' tokens that remain
  int64_t summaries_computed_ = 0;
  bool done_ = false;
  std::vector<HiddenStates> hidden_;     // [num_ranks], or none
  ParallelExecutor::RankScores scores_;  // [num_ranks] while the stage scores

  std::vector<double> query_sums_;          // [query_means][num_layers, q_size] of the stage
  ParallelExecutor::RankScores attention_;  // for the stage's attention_to, range after range: [num_ranks], or none
  std::vector<LineReport> line_reports_;    // [num_ranks], once a stage was whole
  // [num_ranks], or none: for all passes of a policy that is not exact.
  std::vector<std::unique_ptr<HeadRestore>> restores_;
  std::vector<std::unique_ptr<SparseFfn>> sparse_ffns_;
  std::vector<std::unique_ptr<LayerObserver>> stage_observers_;
  std::vector<ObserverList> observers_;  // [num_ranks]: all of these, for the stage

  std::optional<SeenPages> seen_;  // null: the stage sees all

  // State of the current pass.
  std::vector<int32_t> pass_tokens_, pass_positions_;
  // Final pages in the stage's layers: before and behind the pass.
  PageRanges final_, final_with_pass_;
  PageRanges untouched_;  // final in every layer, whatever passes have run
  GivenPages given_;
};

}  // namespace spl::engine
