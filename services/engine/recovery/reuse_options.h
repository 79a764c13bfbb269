// Options of a request about prefill and reuse.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kernels/selection/loopserve/select_lines.h"
#include "kernels/selection/sparsex/pool_scores.h"
#include "kernels/selection/top_k.h"
#include "services/engine/model/head_classes.h"
#include "services/engine/model/model_config.h"
#include "services/engine/model/option_field.h"

namespace spl::engine {

// Defaults are those of docs/methods/sparsex.md and docs/methods/baselines.md, except where a comment names a result. A
// new member must also be added to kReuseOptionFields (docs/extending.md).
struct ReuseOptions {
  std::string policy;  // "" and "auto": the caller chooses, by whether there is KV to reuse; otherwise exact
  // SparseX.
  // Layers before the boundary, which compute every row; -1: by model and contexts of the copies.
  int32_t dense_layers = -1;
  // Share of the reused tokens that is recomputed, bounded by the next two options. -1: 0.05; in samkv 0.15, which is
  // about what SamKV recomputes (docs/results, samkv).
  double recompute_share = -1;
  // Lower bound of recomputed tokens. -1: 64, with segments from other contexts 256, or 576 behind a probe
  // (docs/results, short prompts and fewer rows), but not more than recompute_max.
  int32_t recompute_min = -1;
  int32_t recompute_max = 4096;
  // A token's score also counts for its neighbours within this distance, so that whole phrases are chosen. 0: only for
  // the token itself, as in the paper.
  int32_t score_pool = 4;
  // Layers through which the fresh text alone runs over the copies, and chooses the rows that are then computed in all
  // layers. 0: the dense layers choose. -1: all layers, or dense layers, whichever computes fewer rows. Excludes
  // dense_layers.
  int32_t probe_layers = -1;
  // Last layers of the probe whose scores are added up, at most probe_layers. -1: half of them.
  int32_t score_layers = -1;
  // Last tokens of the fresh text that the probe consists of. 0: all of it. -1: SparseXProbePolicy::kProbeTokens.
  int32_t probe_tokens = -1;
  int32_t overflow_tokens = 16;  // on each side of fresh text
  int32_t tail_tokens = 64;      // probes and rows at the end of a prompt that ends with reused text
  int32_t link_tokens = -1;      // first tokens of each segment; -1: 8 for segments from other contexts, otherwise 0
  // Limit that the request sets: scores choose at most this share of the reused tokens.
  double max_recompute_fraction = 1;
  // CacheBlend.
  double blend_share = 0.16;
  // EPIC.
  int32_t epic_tokens = 16;
  // SamKV: kept tokens as a share of the segments' tokens, initial and local tiles included (SamKvBudget::ratio). -1:
  // 0.15, but at least 1,024 tokens of all segments together (docs/results, short prompts).
  double budget_ratio = -1;
  bool fusion = false;  // blends recomputed K and V with the copies' instead of overwriting them
  // Kept tokens that are recomputed once tiles are chosen: samkv (all), attended (initial and local ones, and those
  // that their document attends to most), sparsex (the kept rows that sparsex would compute) or none. Empty: none with
  // choose=recovered, which has recomputed them before; otherwise samkv.
  std::string recompute;
  std::string choose = "recovered";  // how tiles are chosen: recovered, attention, or means (the paper's); see samkv.h
  bool personal_bias = true;         // means: the query for a document also depends on the other documents
  // recovered: reads 4-bit copies of segments that are stored but not in the worker's pool, if there are such copies.
  bool quantized_copies = true;
  // Moves the tokens that any layer keeps together, as a shorter prompt. False: they keep their positions, with gaps.
  bool compact = false;
  // Head classes: redknot, splice, splice+.
  bool full_kv = false;  // decodes from the whole KV: nothing is left out
  // Rows that run through feed-forward, see FfnSchedule. -1: as in the head class map.
  double ffn_mass = -1;
  int32_t ffn_dense_layers = -1;
  int32_t ffn_recent = -1;
  int32_t ffn_deep_layer = -1;
  double ffn_deep_mass = -1;
  double rec_frac = -1;  // splice+: share of the prompt's rows that is computed; -1: as many as splice
  // splice: local heads score rows, too, with full visibility for that measurement. False: only global heads score, as
  // in docs/methods/splice.md; four points fewer right answers (docs/results, head classes).
  bool score_all_heads = true;
  double restore_share = kRestoreShareMax;  // upper bound, of the local heads
  double restore_threshold = 0.15;          // -1, which no request can set: only the limit of the profile counts
  // Cold spans (docs/cold-prompts.md). loopserve, minference: rows that are sampled in a layer. For loopserve also the
  // share of their attention that the lines must have, and the shortest span that chooses lines.
  int32_t line_samples = 64;
  double line_alpha = 0.995;
  int32_t line_min_span = 4096;
  bool head_classes = false;  // loopserve: local heads see sinks and window only, in decoding, too
  // minference: lines of each head.
  int32_t line_columns = 1000;
  int32_t line_slashes = 6096;
  // a-shape, tri-shape.
  int32_t band_sinks = 128;
  int32_t band_window = 3968;
  int32_t band_last_rows = 100;  // tri-shape: rows at the prompt's end that see everything
};

// Every member except `policy`, by its name in the API, with its range.
inline constexpr OptionField<ReuseOptions> kReuseOptionFields[] = {
    {"dense_layers", &ReuseOptions::dense_layers, -1},
    {"recompute_share", &ReuseOptions::recompute_share},
    {"recompute_min", &ReuseOptions::recompute_min, -1, kernels::kTopKScoresMax},
    {"recompute_max", &ReuseOptions::recompute_max, 0, kernels::kTopKScoresMax},
    {"score_pool", &ReuseOptions::score_pool, 0, kernels::kPoolRadiusMax},
    {"probe_layers", &ReuseOptions::probe_layers, -1},
    {"score_layers", &ReuseOptions::score_layers, 1},
    {"probe_tokens", &ReuseOptions::probe_tokens, -1},
    {"overflow_tokens", &ReuseOptions::overflow_tokens, 0, 4096},
    {"tail_tokens", &ReuseOptions::tail_tokens, 1, 4096},
    {"link_tokens", &ReuseOptions::link_tokens, -1, 4096},
    {"max_recompute_fraction", &ReuseOptions::max_recompute_fraction},
    {"blend_share", &ReuseOptions::blend_share},
    {"epic_tokens", &ReuseOptions::epic_tokens, 0, 4096},
    {"budget_ratio", &ReuseOptions::budget_ratio},
    {"fusion", &ReuseOptions::fusion},
    {"recompute", &ReuseOptions::recompute},
    {"choose", &ReuseOptions::choose},
    {"personal_bias", &ReuseOptions::personal_bias},
    {"quantized_copies", &ReuseOptions::quantized_copies},
    {"compact", &ReuseOptions::compact},
    {"full_kv", &ReuseOptions::full_kv},
    {"ffn_mass", &ReuseOptions::ffn_mass},
    {"ffn_dense_layers", &ReuseOptions::ffn_dense_layers, -1},
    {"ffn_recent", &ReuseOptions::ffn_recent, -1, 1 << 20},
    {"ffn_deep_layer", &ReuseOptions::ffn_deep_layer, -1},
    {"ffn_deep_mass", &ReuseOptions::ffn_deep_mass},
    {"rec_frac", &ReuseOptions::rec_frac},
    {"score_all_heads", &ReuseOptions::score_all_heads},
    {"restore_share", &ReuseOptions::restore_share},
    {"restore_threshold", &ReuseOptions::restore_threshold, -1},
    {"line_samples", &ReuseOptions::line_samples, 16, kernels::kMaxLineSamples},
    {"line_alpha", &ReuseOptions::line_alpha},
    {"line_min_span", &ReuseOptions::line_min_span, 1},
    {"head_classes", &ReuseOptions::head_classes},
    {"line_columns", &ReuseOptions::line_columns, 1, kernels::kMaxLines},
    {"line_slashes", &ReuseOptions::line_slashes, 1, kernels::kMaxLines},
    {"band_sinks", &ReuseOptions::band_sinks, 0, 1 << 20},
    {"band_window", &ReuseOptions::band_window, 1, 1 << 30},
    {"band_last_rows", &ReuseOptions::band_last_rows, 1, 1 << 20},
};

// A text of the policy and every option. Equal texts mean equal methods. KV that is not exact is reused only by an
// equal method.
std::string MethodOf(const ReuseOptions& options);

// InvalidArgument names the field, its value and its range.
absl::Status ValidateReuseOptions(const ReuseOptions& options, const ModelConfig& config);

}  // namespace spl::engine
