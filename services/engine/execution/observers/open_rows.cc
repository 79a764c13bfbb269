#include "services/engine/execution/observers/open_rows.h"

#include <algorithm>

namespace spl::engine {

// These rows once more: that is what stays.
absl::Status OpenRows::AfterAttention(const LayerView& view) {
  const auto& positions = view.rows.positions;
  const auto first = std::lower_bound(positions.begin(), positions.end(), first_position_);
  if (first == positions.end()) return absl::OkStatus();
  std::vector<kernels::HeadStreamView> heads(view.heads.begin(), view.heads.end());
  for (kernels::HeadStreamView& head : heads) head.visibility = view.model.config().visibility(view.layer);
  kernels::PrefillAttentionArgs args = view.attention;
  args.last_rows = static_cast<int32_t>(positions.end() - first);
  return AttendAgain(view, args, heads);
}

}  // namespace spl::engine
