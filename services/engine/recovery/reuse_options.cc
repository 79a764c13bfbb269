#include "services/engine/recovery/reuse_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <variant>

#include "kernels/selection/top_k.h"
#include "services/base/check_range.h"
#include "services/base/status.h"

namespace spl::engine {
std::string MethodOf(const ReuseOptions& options) {
  std::string method = options.policy + " ";
  for (const auto& field : kReuseOptionFields)
    std::visit([&](auto member) { fmt::format_to(std::back_inserter(method), "{} ", options.*member); }, field.member);
  return method;
}

absl::Status ValidateReuseOptions(const ReuseOptions& o, const ModelConfig& config) {
  for (const auto& field : kReuseOptionFields) SPLICE_RETURN_IF_ERROR(CheckOption(field, o));
  for (const auto& [name, layers] : {std::pair("dense_layers", o.dense_layers),
                                     {"ffn_dense_layers", o.ffn_dense_layers},
                                     {"ffn_deep_layer", o.ffn_deep_layer}})
    SPLICE_RETURN_IF_ERROR(CheckRange(name, layers, -1, config.num_layers));
  SPLICE_RETURN_IF_ERROR(CheckRange("probe_layers", o.probe_layers, -1, config.num_layers));
  if (o.score_layers != -1) {
    const int32_t probe_layers = o.dense_layers >= 0 ? 0 : o.probe_layers == -1 ? config.num_layers : o.probe_layers;
    SPLICE_RETURN_IF_ERROR(CheckRange("score_layers", o.score_layers, 1, std::max(1, probe_layers)));
  }
  if (o.probe_layers > 0 && o.dense_layers >= 0)
    return InvalidArgument(
        "probe_layers is {} and dense_layers is {}, and only one of them can choose the rows: leave one out",
        o.probe_layers, o.dense_layers);
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
