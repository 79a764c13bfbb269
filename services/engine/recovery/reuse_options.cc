#include "services/engine/recovery/reuse_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <variant>

#include "kernels/selection/loopserve/select_lines.h"
#include "kernels/selection/sparsex/pool_scores.h"
#include "kernels/selection/top_k.h"
#include "services/base/check_range.h"
#include "services/base/status.h"

namespace spl::engine {
namespace {

constexpr OptionField<ReuseOptions> kFields[] = {
    {"dense_layers", &ReuseOptions::dense_layers, -1},
    {"recompute_share", &ReuseOptions::recompute_share},
    {"recompute_min", &ReuseOptions::recompute_min, -1, kernels::kTopKScoresMax},
    {"recompute_max", &ReuseOptions::recompute_max, 0, kernels::kTopKScoresMax},
    {"score_pool", &ReuseOptions::score_pool, 0, kernels::kPoolRadiusMax},
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
    {"restore_threshold", &ReuseOptions::restore_threshold},
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

}  // namespace

std::span<const OptionField<ReuseOptions>> ReuseOptionFields() { return kFields; }

std::string MethodOf(const ReuseOptions& options) {
  std::string method = options.policy + " ";
  for (const auto& field : kFields)
    std::visit([&](auto member) { fmt::format_to(std::back_inserter(method), "{} ", options.*member); }, field.member);
  return method;
}

absl::Status ValidateReuseOptions(const ReuseOptions& o, const ModelConfig& config) {
  for (const auto& field : kFields) SPLICE_RETURN_IF_ERROR(CheckOption(field, o));
  for (const auto& [name, layers] : {std::pair("dense_layers", o.dense_layers),
                                     {"ffn_dense_layers", o.ffn_dense_layers},
                                     {"ffn_deep_layer", o.ffn_deep_layer}})
    SPLICE_RETURN_IF_ERROR(CheckRange(name, layers, -1, config.num_layers));
  SPLICE_RETURN_IF_ERROR(
      CheckRange("recompute_max", o.recompute_max, std::max(0, o.recompute_min), kernels::kTopKScoresMax));
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
  if (!(o.line_alpha > 0 && o.line_alpha <= 1))
    return InvalidArgument("line_alpha is {}, it must be above 0 and at most 1", o.line_alpha);
  return absl::OkStatus();
}

}  // namespace spl::engine
