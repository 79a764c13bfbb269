// A prefill method as a plan for the layer-by-layer executor (docs/methods/splice.md).
//
// A plan is one or more stages. A stage computes some rows in some layers; between two stages the executor may have
// scored cached positions, and the policy turns the best of them into the rows of the next stage. Layers only ascend.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/common/visibility.h"
#include "kernels/selection/loopserve/select_lines.h"
#include "services/engine/model/head_classes.h"
#include "services/engine/model/model_config.h"
#include "services/engine/model/position_ranges.h"

namespace spl::engine {

struct SegmentSummary;  // services/engine/cache/segment_summary.h

// Which rows of a pass run through a layer's feed-forward.
struct FfnPlan {
  double mass = 1;                // the most important ones up to this share (RowsByMass); 1: all
  int32_t keep_from = INT32_MAX;  // and every row at or behind this position
  bool dense() const { return mass >= 1; }
};

// How the rows of a stage that runs whole find out what to look at in one layer
// (kernels/selection/loopserve/select_lines.h).
struct LineTask {
  kernels::LineOptions options;
  std::vector<int32_t> samples;  // rows of the stage that are asked, ascending
  // Rows that are not asked and tell afterwards what share of their attention the lines have
  // (docs/methods/loopserve.md: fidelity); ascending. Empty: it is not measured in this layer, and neither is the share
  // of cells.
  std::vector<int32_t> held_out;
  std::vector<int32_t> kv_heads;  // of the model, ascending, not empty; the others see what `visibility` says
};

// What one layer does with the rows of one sequence. Spans and pointers are valid until the next PlanLayer of the same
// policy; lists of tokens (VisibilityRule::kList) until the next stage.
struct LayerPlan {
  // What the rows of each KV head attend to. [num_kv_heads]
  std::span<const kernels::HeadVisibility> visibility;
  FfnPlan ffn;
  // [num_kv_heads]: a head with more attention than this outside of what it sees, on the prompt's last rows, gets the
  // model's own visibility back (edge_restore.h). Empty: none does.
  std::span<const float> restore_above;
  // Of a stage that runs whole, heads whose visibility is kFull: null where no head chooses lines.
  const LineTask* lines = nullptr;
};

// Layers [begin, end).
struct LayerRange {
  int32_t begin = 0;
  int32_t end = 0;
  bool operator==(const LayerRange&) const = default;
};

// Where a prompt's KV is already, in its final place.
struct ReuseLayout {
  int32_t num_tokens = 0;
  int32_t num_prefix = 0;  // exact prefix hits: never computed again
  // Copies of segments, turned to their new positions: ascending, disjoint, behind the prefix. One range for each
  // copied run, so that two neighbours stay two.
  std::vector<PositionRange> reused;
  // Whether each of `reused` is not known to have been computed behind the text that stands in front of it here: it was
  // computed by itself, behind other text, or nobody can tell (chunks of a store).
  std::vector<bool> isolated;

  PositionRange active() const { return {num_prefix, num_tokens}; }  // whatever is not the prefix
  PositionRanges fresh() const { return ComplementOf(reused, active()); }
  // Of the prompt that is left when everything but `only`, which holds the prefix and the last position, is dropped and
  // what is left stands together. Copies of which nothing is left vanish.
  ReuseLayout Only(std::span<const PositionRange> only) const;
};

enum class ScoreKind : uint8_t {
  kNone,
  kColumnMass,      // attention that the probes pay to each candidate (kernels/selection/sparsex/column_scores.h)
  kValueDeviation,  // distance of fresh values from cached ones (kernels/selection/cacheblend/value_deviation.h)
};

struct ScoreRequest {
  ScoreKind kind = ScoreKind::kNone;
  int32_t layer = 0;              // of the stage
  PositionRanges candidates;      // scored
  PositionRanges probes;          // kColumnMass: the rows that score; rows of the stage
  std::vector<int32_t> kv_heads;  // kColumnMass: whose attention counts, ascending; empty: all
  int32_t pool_radius = 0;        // a candidate counts as the best of its neighbours that are as near (PoolScores)
  int64_t k = 0;                  // candidates that the next stage is given, at most all
  // kColumnMass: over all layers from `layer` on, not in that one alone. What heads see is the model's own, or lists
  // that hold all candidates.
  bool all_layers = false;
  bool give_scores = false;  // the policy is given the scores themselves (TakeScores); k is not looked at
};

struct PrefillStage {
  PositionRanges rows;  // never empty
  LayerRange layers;
  // The rows' hidden states behind the stage's last layer, or in front of it where keys_only_last is set, are kept; a
  // stage that begins above layer 0 reads them.
  bool keep_hidden = false;
  // In the last layer only K and V are made: a later stage runs that layer for the rows that go on.
  bool keys_only_last = false;
  // K and V of these layers (but the one of keys_only_last) are final behind the last row: they may be sent away.
  bool kv_is_final = true;
  // All rows, which have no gaps, are one pass of one layer, however many they are: what they look at follows from the
  // queries of all of them. Keeps hidden states, but for the last layer's.
  bool whole = false;
  ScoreRequest score;
  // Rows of the stage whose mean queries, of every layer, the policy is given behind it (TakeQueryMeans). Disjoint,
  // ascending.
  PositionRanges query_means;
  // Of each of query_means the positions whose attention from these rows, in all layers, tells which of them are most
  // attended; perhaps none, begin == end. All are in front of the rows, which see them. [query_means.size()], or empty.
  PositionRanges attention_to;
  // >= 0: the stage only finds out the mean query of this copy's last tiles and its attended tokens, all of its rows
  // are the copy's, and the copy is made again behind it. What is found is kept with the copy's source.
  int32_t summary_of = -1;
  int32_t open_from = INT32_MAX;  // rows at or behind it see all that the model lets them, whatever PlanLayer says
  PositionRanges fuse;            // rows whose K and V are blended with those in their place
  // Not empty: in front of the stage everything else of the prompt is dropped, and these positions, with the prefix and
  // the last one among them, stand together from 0 on. The stage, and all behind it, is about what is left
  // (ReuseLayout::Only). No KV of an earlier stage was final.
  PositionRanges only;
};

// Of a copy without its KV, at the positions where the copy stands; see SegmentSummary.
struct CopySummary {
  std::vector<float> tile_means;
  std::vector<float> local_query;  // empty: not known yet, and neither is what follows
  std::vector<int32_t> attended;   // offsets in the copy, ascending
};

// One object per request; used by the engine thread only. A policy decides and never allocates pages, copies or runs
// kernels: that is the executor's part.
class RecoveryPolicy {
 public:
  explicit RecoveryPolicy(const ModelConfig& config) : config_(config), visibility_(config.num_kv_heads) {}
  virtual ~RecoveryPolicy() = default;
  virtual std::string_view name() const = 0;
  // Whether copies of segments are wanted at all. Without a copy every policy computes every row in every layer, and
  // its KV is exact.
  virtual bool reuses_segments() const = 0;
  // Whether KV that is computed without any copy is that of a plain prefill.
  virtual bool is_exact(const ReuseLayout& /*layout*/) const { return true; }
  // Whether a pass holds rows of one prompt only: what heads see may differ between prompts, which a device's attention
  // has no tables for.
  virtual bool runs_alone(const ReuseLayout& /*layout*/) const { return false; }
  // Of these KV heads, over all layers, at most so many are restored. Asked after FirstStage.
  virtual int32_t RestoreCap(int32_t /*first_kv_head*/, int32_t /*num_kv_heads*/) const { return 0; }
  // The first layer whose cached K and V are read; copies of the layers below are not needed. Asked after FirstStage.
  virtual int32_t first_cached_layer() const { return 0; }

  // Segments that a prompt may mark.
  virtual int32_t max_segments() const { return INT32_MAX; }
  // Whether it chooses by summaries of the copies: it is given them in front of FirstStage, one for each of
  // ReuseLayout::reused.
  virtual bool wants_summaries() const { return false; }
  // Of these the mean keys; and the local queries with the attended tokens.
  virtual bool wants_tile_means() const { return wants_summaries(); }
  virtual bool wants_local_queries() const { return false; }
  virtual void SetSummaries(std::vector<CopySummary> /*summaries*/) {}
  // Of a copy of so many 64-token tiles whose summary is known: the tiles whose K and V are read, ascending. Null: all.
  virtual std::optional<std::vector<int32_t>> TilesRead(int32_t /*num_tiles*/) const { return std::nullopt; }
  // Whether approximate copies of stored segments do, which have no KV of the layers below the one that is given: of
  // segments that were computed by themselves, or behind other text. Null: copies are to be what was stored.
  virtual std::optional<int32_t> FirstQuantizedLayer(bool /*isolated*/) const { return std::nullopt; }
  bool ReadsQuantized() const {
    return FirstQuantizedLayer(true).has_value() || FirstQuantizedLayer(false).has_value();
  }
  // Behind a stage with query_means, in front of NextStage: [query_means.size(), num_layers, num_qo_heads * head_dim].
  virtual void TakeQueryMeans(std::vector<float> /*means*/) {}
  // Behind a stage with attention_to, likewise: of each of its ranges the positions that get most (MostAttended),
  // ascending.
  virtual void TakeAttended(std::vector<std::vector<int32_t>> /*positions*/) {}
  // Behind the run of a policy that notes summaries on the way: local query and attended tokens of this segment of the
  // prompt; empty where it has none.
  virtual SegmentSummary LocalSummaryOf(const PositionRange& segment) const;
  // Behind a stage that scores and says so, in front of NextStage: of each candidate, in their order.
  virtual void TakeScores(std::vector<float> /*scores*/) {}
  // Behind the last stage, of a policy that leaves tokens out: what each layer keeps of the prompt. [num_layers];
  // empty: everything.
  virtual std::span<const PositionRanges> kept() const { return {}; }

  // The model's own: everything before the row, or its sliding window.
  virtual LayerPlan PlanLayer(int32_t layer);

  // REQUIRES: layout.num_prefix < layout.num_tokens. The last position is a row of the last stage.
  PrefillStage FirstStage(const ReuseLayout& layout);
  // `selected`: the best candidates of the stage before, ascending. Null behind the last stage.
  virtual std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected);

 protected:
  // In front of everything else.
  virtual void Prepare(const ReuseLayout& /*layout*/) {}
  // With something reused, and without; all rows through all layers.
  virtual PrefillStage FirstReuseStage(const ReuseLayout& layout);
  virtual PrefillStage FirstColdStage(const ReuseLayout& layout);
  PrefillStage AllRows(const ReuseLayout& layout) const;
  const ModelConfig& config() const { return config_; }

 private:
  const ModelConfig& config_;  // of the model, which outlives its requests
  std::vector<kernels::HeadVisibility> visibility_;
};

}  // namespace spl::engine
