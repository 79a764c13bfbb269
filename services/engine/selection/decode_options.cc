#include "services/engine/selection/decode_options.h"

#include <algorithm>

#include "kernels/common/token_selection.h"
#include "services/base/check_range.h"
#include "services/base/status.h"

namespace spl::engine {

absl::Status ValidateDecodeOptions(const DecodeOptions& o, const ModelConfig& config) {
  for (OptionField<DecodeOptions> field : kDecodeOptionFields) {
    if (field.most == kernels::kSelectBudgetMax) field.most = std::min(field.most, config.max_positions);
    SPLICE_RETURN_IF_ERROR(CheckOption(field, o));
  }
  SPLICE_RETURN_IF_ERROR(CheckRange("decode_dense_layers", o.dense_layers, 0, config.num_layers));
  return absl::OkStatus();
}

}  // namespace spl::engine
