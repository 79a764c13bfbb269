#include "services/engine/recovery/reuse_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "kernels/selection/pool_scores.h"
#include "kernels/selection/select_lines.h"
#include "kernels/selection/top_k.h"
#include "services/base/check_range.h"
#include "services/base/status.h"

namespace spl::engine {

std::string MethodOf(const ReuseOptions& options) {
  // All fields by number, so that one more is an error here.
  const auto& [policy, dense_layers, recompute_share, recompute_min, recompute_max, score_pool, overflow_tokens,
               tail_tokens, link_tokens, max_recompute_fraction, blend_share, epic_tokens, budget_ratio, fusion,
               recompute, choose, personal_bias, quantized_copies, compact, full_kv, ffn_mass, ffn_dense_layers,
               ffn_recent, ffn_deep_layer, ffn_deep_mass, rec_frac, score_all_heads, restore_share, restore_threshold,
               line_samples, line_alpha, line_min_span, head_classes, line_columns, line_slashes, band_sinks,
               band_window, band_last_rows] = options;
  std::string method;
  const auto append = [&](const auto&... values) { (fmt::format_to(std::back_inserter(method), "{} ", values), ...); };
  append(policy, dense_layers, recompute_share, recompute_min, recompute_max, score_pool, overflow_tokens, tail_tokens,
         link_tokens, max_recompute_fraction, blend_share, epic_tokens, budget_ratio, fusion, recompute, choose,
         personal_bias, quantized_copies, compact, full_kv, ffn_mass, ffn_dense_layers, ffn_recent, ffn_deep_layer,
         ffn_deep_mass, rec_frac, score_all_heads, restore_share, restore_threshold, line_samples, line_alpha,
         line_min_span, head_classes, line_columns, line_slashes, band_sinks, band_window, band_last_rows);
  return method;
}

absl::Status ValidateReuseOptions(const ReuseOptions& o, const ModelConfig& config) {
  SPLICE_RETURN_IF_ERROR(CheckRange("dense_layers", o.dense_layers, -1, config.num_layers));
  if (o.recompute_share != -1) SPLICE_RETURN_IF_ERROR(CheckShare("recompute_share", o.recompute_share));
  SPLICE_RETURN_IF_ERROR(CheckRange("recompute_min", o.recompute_min, -1, kernels::kTopKScoresMax));
  SPLICE_RETURN_IF_ERROR(
      CheckRange("recompute_max", o.recompute_max, std::max(0, o.recompute_min), kernels::kTopKScoresMax));
  SPLICE_RETURN_IF_ERROR(CheckRange("overflow_tokens", o.overflow_tokens, 0, 4096));
  SPLICE_RETURN_IF_ERROR(CheckRange("score_pool", o.score_pool, 0, kernels::kPoolRadiusMax));
  SPLICE_RETURN_IF_ERROR(CheckRange("tail_tokens", o.tail_tokens, 1, 4096));
  SPLICE_RETURN_IF_ERROR(CheckRange("link_tokens", o.link_tokens, -1, 4096));
  SPLICE_RETURN_IF_ERROR(CheckShare("max_recompute_fraction", o.max_recompute_fraction));
  SPLICE_RETURN_IF_ERROR(CheckShare("blend_share", o.blend_share));
  if (o.ffn_mass != -1) SPLICE_RETURN_IF_ERROR(CheckShare("ffn_mass", o.ffn_mass));
  if (o.ffn_deep_mass != -1) SPLICE_RETURN_IF_ERROR(CheckShare("ffn_deep_mass", o.ffn_deep_mass));
  SPLICE_RETURN_IF_ERROR(CheckRange("ffn_dense_layers", o.ffn_dense_layers, -1, config.num_layers));
  SPLICE_RETURN_IF_ERROR(CheckRange("ffn_deep_layer", o.ffn_deep_layer, -1, config.num_layers));
  SPLICE_RETURN_IF_ERROR(CheckRange("ffn_recent", o.ffn_recent, -1, 1 << 20));
  if (o.rec_frac != -1) SPLICE_RETURN_IF_ERROR(CheckShare("rec_frac", o.rec_frac));
  SPLICE_RETURN_IF_ERROR(CheckShare("restore_share", o.restore_share));
  if (o.restore_threshold != -1) SPLICE_RETURN_IF_ERROR(CheckShare("restore_threshold", o.restore_threshold));
  if (o.budget_ratio != -1) SPLICE_RETURN_IF_ERROR(CheckShare("budget_ratio", o.budget_ratio));
  if (!o.recompute.empty() && o.recompute != "samkv" && o.recompute != "attended" && o.recompute != "sparsex" &&
      o.recompute != "none")
    return InvalidArgument("recompute is '{}', it must be samkv, attended, sparsex or none", o.recompute);
  if (o.choose != "recovered" && o.choose != "attention" && o.choose != "means")
    return InvalidArgument("choose is '{}', it must be recovered, attention or means", o.choose);
  if ((o.recompute == "sparsex" || o.recompute == "attended") && o.choose == "recovered")
    return InvalidArgument(
        "recompute is '{}', and choose is 'recovered', which has computed rows of its own before it chooses: leave "
        "recompute out, or set choose to attention or means",
        o.recompute);
  if (o.fusion && (o.choose == "recovered" || o.recompute == "sparsex"))
    return InvalidArgument(
        "fusion is true, and nothing is left to blend with behind choose 'recovered' or recompute 'sparsex': set "
        "choose to attention or means, and recompute to samkv or attended");
  SPLICE_RETURN_IF_ERROR(CheckRange("line_samples", o.line_samples, 16, kernels::kMaxLineSamples));
  if (!(o.line_alpha > 0 && o.line_alpha <= 1))
    return InvalidArgument("line_alpha is {}, it must be above 0 and at most 1", o.line_alpha);
  SPLICE_RETURN_IF_ERROR(CheckRange("line_min_span", o.line_min_span, 1, INT32_MAX));
  SPLICE_RETURN_IF_ERROR(CheckRange("line_columns", o.line_columns, 1, kernels::kMaxLines));
  SPLICE_RETURN_IF_ERROR(CheckRange("line_slashes", o.line_slashes, 1, kernels::kMaxLines));
  SPLICE_RETURN_IF_ERROR(CheckRange("band_sinks", o.band_sinks, 0, 1 << 20));
  SPLICE_RETURN_IF_ERROR(CheckRange("band_window", o.band_window, 1, 1 << 30));
  SPLICE_RETURN_IF_ERROR(CheckRange("band_last_rows", o.band_last_rows, 1, 1 << 20));
  return CheckRange("epic_tokens", o.epic_tokens, 0, 4096);
}

}  // namespace spl::engine
