#include "services/engine/selection/decode_options.h"

#include <algorithm>

#include "kernels/common/token_selection.h"
#include "kernels/selection/sparcas/compact_keys.h"
#include "services/base/check_range.h"
#include "services/base/status.h"

namespace spl::engine {

absl::Status ValidateDecodeOptions(const DecodeOptions& o, const ModelConfig& config) {
  for (OptionField<DecodeOptions> field : kDecodeOptionFields) {
    if (field.most == kernels::kSelectBudgetMax) field.most = std::min(field.most, config.max_positions);
    SPLICE_RETURN_IF_ERROR(CheckOption(field, o));
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
