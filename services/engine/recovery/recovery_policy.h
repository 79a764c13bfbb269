// A prefill method, as a plan for the layer-by-layer executor (docs/methods/splice.md).
//
// A plan has one or more stages. A stage computes some rows in some layers. The executor may score cached positions in
// a stage; the policy turns the best of them into the rows of the next stage. Within a stage layers only ascend.
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
#include "services/engine/cache/copy_context.h"
#include "services/engine/model/head_classes.h"
#include "services/engine/model/model_config.h"
#include "services/engine/model/position_ranges.h"

namespace spl::engine {

struct SegmentSummary;  // services/engine/cache/segment_summary.h

// The rows of a pass that run through a layer's feed-forward.
struct FfnPlan {
  double mass = 1;                // the most important rows, up to this share (RowsByMass); 1: all
  int32_t keep_from = INT32_MAX;  // and every row from this position on
  bool dense() const { return mass >= 1; }
};

// Task for one layer of a stage that runs whole: choose the lines that its rows attend to
// (kernels/selection/loopserve/select_lines.h).
struct LineTask {
  kernels::LineOptions options;
  std::vector<int32_t> samples;  // rows of the stage whose attention is sampled, ascending
  // Other rows, ascending: they measure afterwards which share of their attention is on the lines
  // (docs/methods/loopserve.md: fidelity). Empty: neither this share nor the share of cells is measured in this layer.
  std::vector<int32_t> held_out;
  std::vector<int32_t> kv_heads;  // heads of the model that choose, ascending, not empty; others follow `visibility`
};

// Plan of one layer for the rows of one sequence. Spans and pointers are valid until the next PlanLayer of the same
// policy; lists of tokens (VisibilityRule::kList) until the next stage.
struct LayerPlan {
  // Visibility of the rows in each KV head. [num_kv_heads]
  std::span<const kernels::HeadVisibility> visibility;
  FfnPlan ffn;
  // [num_kv_heads]: limits of edge mass. A head whose last rows have more attention than this outside of what they see
  // gets the model's own visibility back (edge_restore.h). Empty: no head is restored.
  std::span<const float> restore_above;
  // Only for a stage that runs whole; applies to heads whose visibility is kFull. Null: no head chooses lines.
  const LineTask* lines = nullptr;
};

// Layers [begin, end).
struct LayerRange {
  int32_t begin = 0;
  int32_t end = 0;
  bool operator==(const LayerRange&) const = default;
};

// The parts of a prompt whose KV is already in its final place.
struct ReuseLayout {
  int32_t num_tokens = 0;
  int32_t num_prefix = 0;  // exact prefix hits: never computed again
  // Copies of segments, rotated to their new positions: ascending, disjoint, after the prefix. One range for each
  // copied run: two neighbours stay two ranges.
  std::vector<PositionRange> reused;
  std::vector<CopyContext> contexts;  // one for each of `reused`
  bool copies_are_whole = true;       // false: some copies lack tokens or lower layers (SegmentSource::is_whole)

  PositionRange active() const { return {num_prefix, num_tokens}; }  // everything after the prefix
  PositionRanges fresh() const { return ComplementOf(reused, active()); }
  // Layout of the shorter prompt that has only the positions of `only`, moved together. `only` contains the prefix and
  // the last position. Drops copies that become empty.
  ReuseLayout Only(std::span<const PositionRange> only) const;
};

enum class ScoreKind : uint8_t {
  kNone,
  kColumnMass,      // attention that the probes pay to each candidate (kernels/selection/sparsex/column_scores.h)
  kValueDeviation,  // distance of fresh values from cached ones (kernels/selection/cacheblend/value_deviation.h)
};

struct ScoreRequest {
  ScoreKind kind = ScoreKind::kNone;
  int32_t layer = 0;          // a layer of the stage
  PositionRanges candidates;  // scored
  PositionRanges probes;      // kColumnMass: rows of the stage whose attention is summed
  // kColumnMass: for each layer that scores, the heads whose attention counts, ascending; empty: all of the layer. The
  // list itself empty: all of every layer.
  std::vector<std::vector<int32_t>> kv_heads;
  int32_t pool_radius = 0;  // a candidate gets the best score of its neighbours within this distance (PoolScores)
  int64_t k = 0;            // candidates that the next stage gets, at most all
  // kColumnMass: sums over all layers from `layer` on, not over that one alone. The heads' visibility must be the
  // model's own, or lists that contain all candidates.
  bool all_layers = false;
  bool give_scores = false;  // the policy gets the scores themselves (TakeScores); `k` is ignored
};

struct PrefillStage {
  PositionRanges rows;  // never empty
  LayerRange layers;
  // Keeps the rows' hidden states after the stage's last layer, or before it if keys_only_last is set. A stage that
  // begins above layer 0 reads them.
  bool keep_hidden = false;
  // Computes only K and V in the last layer. A later stage runs that layer for the rows that continue.
  bool keys_only_last = false;
  // Later stages do not write K and V of positions before this one in these layers, except in that of keys_only_last: a
  // page of them is final, and may be sent, when the stage has run its rows, or at once if it has none.
  int32_t final_before = INT32_MAX;
  // Whole pages of fresh text that the stage's rows do not see, as if they were not in the prompt: no row of the stage
  // is in them, and nothing has written them yet. REQUIRES: a model without sliding windows; the stage begins at layer
  // 0, keeps no hidden states, and its plans are RecoveryPolicy's.
  PositionRanges unseen;
  // Runs all rows, which have no gaps, in one pass of one layer, however many they are: what they attend to depends on
  // the queries of all of them. Keeps hidden states, except those of the last layer.
  bool whole = false;
  ScoreRequest score;
  // Rows of the stage whose mean queries, of every layer, the policy gets after it (TakeQueryMeans). Disjoint,
  // ascending.
  PositionRanges query_means;
  // For each of query_means: positions to be ranked by the attention of these rows, summed over all layers; begin ==
  // end: none. All positions are before the rows, which see them. [query_means.size()], or empty.
  PositionRanges attention_to;
  // Index of the copy for which the stage computes the mean query of its last tiles, and its attended tokens. All rows
  // of the stage belong to this copy, which is copied again after the stage. The result is kept with the copy's source.
  // -1: an ordinary stage.
  int32_t summary_of = -1;
  int32_t open_from = INT32_MAX;  // rows from here on see all that the model allows, whatever PlanLayer says
  PositionRanges fuse;            // rows whose K and V are blended with the K and V they replace
  // Positions that stay when the prompt is cut before the stage; everything else is dropped. They include the prefix
  // and the last position, and move together from 0 on. This stage and all later ones are about the shorter prompt
  // (ReuseLayout::Only). No earlier stage's KV was final. Empty: nothing is dropped.
  PositionRanges only;
};

// Summary of a copy, without its KV, at the positions of the copy; see SegmentSummary.
struct CopySummary {
  std::vector<float> tile_means;
  std::vector<float> local_query;  // empty: not known yet, and neither is `attended`
  std::vector<int32_t> attended;   // offsets in the copy, ascending
};

// Rows of copies that are computed whatever scores say.
struct EdgeRows {
  PositionRanges links;       // first tokens of segments
  PositionRanges beside_new;  // next to fresh text
  PositionRanges tail;        // the end of a prompt that ends with a copy, its last position among them
};

// One object for each request; used by the engine thread only. A policy only decides: the executor allocates pages,
// makes copies and runs kernels.
class RecoveryPolicy {
 public:
  explicit RecoveryPolicy(const ModelConfig& config) : config_(config), visibility_(config.num_kv_heads) {}
  virtual ~RecoveryPolicy() = default;
  virtual std::string_view name() const = 0;
  // Whether copies of segments are wanted at all. Without a copy every policy computes every row in every layer.
  virtual bool reuses_segments() const = 0;
  // Whether KV that is computed without any copy equals that of a plain prefill.
  virtual bool is_exact(const ReuseLayout& /*layout*/) const { return true; }
  // Whether a pass must hold rows of one prompt only: the visibility of heads may differ between prompts, and attention
  // on a device has no tables for that.
  virtual bool runs_alone(const ReuseLayout& /*layout*/) const { return false; }
  // Upper bound of the restored heads among these KV heads, over all layers. Asked after FirstStage.
  virtual int32_t RestoreCap(int32_t /*first_kv_head*/, int32_t /*num_kv_heads*/) const { return 0; }
  // The first layer whose cached K and V are read; copies of lower layers are not needed. Asked after FirstStage.
  virtual int32_t first_cached_layer() const { return 0; }
  // Layers through which fresh text alone ran over the copies to choose rows, for the receipt. 0: none. Asked when all
  // stages have run.
  virtual int32_t probe_layers() const { return 0; }
  // First layers in which every recovered row ran, for the receipt. 0: none. Asked when all stages have run.
  virtual int32_t dense_layers_run() const { return 0; }
  // Asked after FirstStage, for the receipt.
  virtual EdgeRows Edges(const ReuseLayout& /*layout*/) const { return {}; }
  // Work on a prompt of this layout, in rows through all layers, as far as it is known before the first stage. Asked
  // before FirstStage, which may then get the same layout only.
  virtual double PredictedRows(const ReuseLayout& layout) { return static_cast<double>(layout.active().size()); }
  // Share of the copies' tokens that is kept, as far as it is known before the first stage.
  virtual double PredictedKept(const ReuseLayout& /*layout*/) const { return 1; }

  // From here to FirstQuantizedLayer, SetSummaries apart: asked by the thread that fetches, too, at any time. The
  // answers depend on the options alone.
  //
  // Share of the work on a copied token that its copy saves, at least: whether fetching it pays.
  virtual double SavedByCopy() const { return 1; }
  // The most segments that a prompt may mark.
  virtual int32_t max_segments() const { return INT32_MAX; }
  // Whether it chooses by summaries of the copies. SetSummaries is then called before FirstStage, with one for each of
  // ReuseLayout::reused.
  virtual bool wants_summaries() const { return false; }
  // Which parts of the summaries it reads: the mean keys of tiles; the local queries, with the attended tokens.
  virtual bool wants_tile_means() const { return wants_summaries(); }
  virtual bool wants_local_queries() const { return false; }
  virtual void SetSummaries(std::vector<CopySummary> /*summaries*/) {}
  // Tiles whose K and V are read, ascending, of a copy of `num_tiles` 64-token tiles whose summary is known. Null: all.
  virtual std::optional<std::vector<int32_t>> TilesRead(int32_t /*num_tiles*/) const { return std::nullopt; }
  // First layer that is needed of quantized copies of stored segments, which have no KV of lower layers. `isolated`:
  // the segments were computed by themselves. Null: copies must be as they were stored.
  virtual std::optional<int32_t> FirstQuantizedLayer(bool /*isolated*/) const { return std::nullopt; }
  bool ReadsQuantized() const {
    return FirstQuantizedLayer(true).has_value() || FirstQuantizedLayer(false).has_value();
  }
  // Called after a stage with query_means, before NextStage: [query_means.size(), num_layers, num_qo_heads * head_dim].
  virtual void TakeQueryMeans(std::vector<float> /*means*/) {}
  // Called after a stage with attention_to, before NextStage: the positions of each range that get most attention
  // (MostAttended), ascending.
  virtual void TakeAttended(std::vector<std::vector<int32_t>> /*positions*/) {}
  // Local query and attended tokens of this segment of the prompt, after the run of a policy that records summaries.
  // Empty if it has none.
  virtual SegmentSummary LocalSummaryOf(const PositionRange& segment) const;
  // Called after a stage with give_scores, before NextStage: a score for each candidate, in their order.
  virtual void TakeScores(std::vector<float> /*scores*/) {}
  // The parts of the prompt that each layer keeps, after the last stage of a policy that leaves tokens out.
  // [num_layers]; empty: everything.
  virtual std::span<const PositionRanges> kept() const { return {}; }

  // By default the model's own visibility: everything before the row, or its sliding window.
  virtual LayerPlan PlanLayer(int32_t layer);

  // All rows that any stage may compute: KV of other positions is final, in all layers, when the copies have been made.
  // Asked after FirstStage. By default all behind the prefix.
  virtual PositionRanges RowsOfAllStages(const ReuseLayout& layout) const { return {layout.active()}; }

  // REQUIRES: layout.num_prefix < layout.num_tokens. The last position is a row of the last stage.
  PrefillStage FirstStage(const ReuseLayout& layout);
  // `selected`: the best candidates of the stage before, ascending. Returns null after the last stage.
  virtual std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected);

 protected:
  // Called before everything else.
  virtual void Prepare(const ReuseLayout& /*layout*/) {}
  // First stage with copies, and without. By default all rows through all layers.
  virtual PrefillStage FirstReuseStage(const ReuseLayout& layout);
  virtual PrefillStage FirstColdStage(const ReuseLayout& layout);
  PrefillStage AllRows(const ReuseLayout& layout) const;
  const ModelConfig& config() const { return config_; }

 private:
  const ModelConfig& config_;  // the model outlives its requests
  std::vector<kernels::HeadVisibility> visibility_;
};

}  // namespace spl::engine
