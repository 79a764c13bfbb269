#include "services/engine/selection/decode_options.h"

#include <algorithm>

#include "kernels/selection/compact_keys.h"
#include "kernels/selection/page_bound_scores.h"
#include "kernels/selection/query_window.h"
#include "kernels/selection/select_tokens.h"
#include "services/base/check_range.h"
#include "services/base/status.h"

namespace spl::engine {

absl::Status ValidateDecodeOptions(const DecodeOptions& o, const ModelConfig& config) {
  const int32_t most = std::min(config.max_positions, kernels::kSelectBudgetMax);
  // -1 is what is not set; what a request sets is never negative.
  if (o.budget != -1) SPLICE_RETURN_IF_ERROR(CheckRange("decode_budget", o.budget, 1, most));
  if (o.recent != -1) SPLICE_RETURN_IF_ERROR(CheckRange("decode_recent", o.recent, 1, most));
  SPLICE_RETURN_IF_ERROR(CheckRange("decode_dense_layers", o.dense_layers, 0, config.num_layers));
  SPLICE_RETURN_IF_ERROR(CheckRange("decode_refresh_interval", o.refresh_interval, 1, 1 << 20));
  if (o.window != -1) SPLICE_RETURN_IF_ERROR(CheckRange("decode_window", o.window, 1, kernels::kQueryWindowMax));
  SPLICE_RETURN_IF_ERROR(CheckRange("decode_sinks", o.sinks, 0, most));
  if (o.selector == "sparcas" && !kernels::CompactKeys{config.head_dim, o.dims}.valid())
    return InvalidArgument("decode_dims is {}, it must be a multiple of 4 that divides {}, at most {}", o.dims,
                           2 * config.head_dim, config.head_dim);
  if (o.selector == "quest" && o.budget != -1 && o.budget % kernels::kBoundTokens != 0)
    return InvalidArgument("decode_budget is {}, quest takes pages of {} tokens: it must be a multiple of that",
                           o.budget, kernels::kBoundTokens);
  return absl::OkStatus();
}

}  // namespace spl::engine
