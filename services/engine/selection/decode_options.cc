#include "services/engine/selection/decode_options.h"

#include <utility>

#include "kernels/common/token_selection.h"
#include "kernels/selection/loopserve/query_window.h"
#include "kernels/selection/sparcas/compact_keys.h"
#include "services/base/check_range.h"
#include "services/base/status.h"

namespace spl::engine {

namespace {

constexpr OptionField<DecodeOptions> kFields[] = {
    {"decode_budget", &DecodeOptions::budget, 1, kernels::kSelectBudgetMax},
    {"decode_dense_layers", &DecodeOptions::dense_layers},
    {"decode_recent", &DecodeOptions::recent, 1, kernels::kSelectBudgetMax},
    {"decode_dims", &DecodeOptions::dims},
    {"decode_refresh_interval", &DecodeOptions::refresh_interval, 1, 1 << 20},
    {"decode_window", &DecodeOptions::window, 1, kernels::kQueryWindowMax},
    {"decode_sinks", &DecodeOptions::sinks, 0, kernels::kSelectBudgetMax},
};

}  // namespace

std::span<const OptionField<DecodeOptions>> DecodeOptionFields() { return kFields; }

absl::Status ValidateDecodeOptions(const DecodeOptions& o, const ModelConfig& config) {
  for (const auto& field : kFields) SPLICE_RETURN_IF_ERROR(CheckOption(field, o));
  for (const auto& [name, tokens] :
       {std::pair("decode_budget", o.budget), {"decode_recent", o.recent}, {"decode_sinks", o.sinks}}) {
    if (tokens > config.max_positions)
      return InvalidArgument("{} is {}, the model's context has {} tokens", name, tokens, config.max_positions);
  }
  SPLICE_RETURN_IF_ERROR(CheckRange("decode_dense_layers", o.dense_layers, 0, config.num_layers));
  if (o.selector == "sparcas" && !kernels::CompactKeys{config.head_dim, o.dims}.valid())
    return InvalidArgument("decode_dims is {}, it must be a multiple of 4 that divides {}, at most {}", o.dims,
                           2 * config.head_dim, config.head_dim);
  if (o.selector == "quest" && o.budget != -1 && o.budget % kernels::kBoundTokens != 0)
    return InvalidArgument("decode_budget is {}, quest takes pages of {} tokens: it must be a multiple of that",
                           o.budget, kernels::kBoundTokens);
  return absl::OkStatus();
}

}  // namespace spl::engine
