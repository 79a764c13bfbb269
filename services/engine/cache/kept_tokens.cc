#include "services/engine/cache/kept_tokens.h"

#include <algorithm>

#include "kernels/common/kv_pool.h"
#include "services/base/status.h"

namespace spl::engine {

bool KeptTokens::KeepsPage(int32_t layer, int32_t page) const {
  const PositionRange of_page{page * kernels::kPageTokens, (page + 1) * kernels::kPageTokens};
  return of_page.end > num_tokens || !IntersectionOf(layers[layer], {&of_page, 1}).empty();
}

absl::Status ValidateKeptTokens(const KeptTokens& kept, int32_t num_layers, int64_t prompt_tokens) {
  if (kept.num_tokens != prompt_tokens || kept.layers.size() != static_cast<size_t>(num_layers))
    return InvalidArgument("kept tokens of {} layers and {} positions, the prompt has {} and {}", kept.layers.size(),
                           kept.num_tokens, num_layers, prompt_tokens);
  for (size_t layer = 0; layer < kept.layers.size(); ++layer) {
    int32_t end = -1;  // ranges that touch must be one range
    for (const PositionRange& range : kept.layers[layer]) {
      if (range.begin <= end || range.end <= range.begin || range.end > kept.num_tokens)
        return InvalidArgument("kept tokens of layer {}: range [{}, {}) behind position {} of a prompt of {}", layer,
                               range.begin, range.end, end, kept.num_tokens);
      end = range.end;
    }
    if (end != kept.num_tokens)
      return InvalidArgument("kept tokens of layer {} end in front of position {}, the prompt's last token is {}",
                             layer, std::max(end, 0), kept.num_tokens - 1);
  }
  return absl::OkStatus();
}

}  // namespace spl::engine
