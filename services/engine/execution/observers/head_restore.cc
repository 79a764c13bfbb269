#include "services/engine/execution/observers/head_restore.h"

#include <algorithm>
#include <cmath>

#include "services/base/status.h"
#include "services/engine/recovery/edge_restore.h"

namespace spl::engine {
namespace {

constexpr size_t kProbes = 64;  // last rows of a prompt (docs/methods/redknot.md, "Restore")

}  // namespace

// The question's end sees what a head may not leave out.
void HeadRestore::BeginPass(std::span<const int32_t> positions) {
  num_probes_ = positions.back() + 1 == prompt_tokens_ ? static_cast<int32_t>(std::min(kProbes, positions.size())) : 0;
}

// The probes once more with all that the model lets them see. When a head had too much outside, the attention of all
// rows runs again with that head whole; the KV of a head is there whatever its class.
absl::Status HeadRestore::AfterAttention(const LayerView& view) {
  if (!Asks(*view.plan) || left_ <= 0) return absl::OkStatus();
  const ModelConfig& c = view.model.config();
  const int32_t first = view.model.first_kv_head();
  const auto thresholds = view.plan->restore_above.subspan(first, c.num_kv_heads);
  if (std::none_of(thresholds.begin(), thresholds.end(), [](float t) { return std::isfinite(t); }))
    return absl::OkStatus();
  const kernels::HeadVisibility own = c.visibility(view.layer);
  SPLICE_RETURN_IF_ERROR(AttendBeside(view, own, num_probes_));
  const auto queries = static_cast<size_t>(c.num_qo_heads);
  const size_t begin = static_cast<size_t>(view.rows.row_end - num_probes_) * queries;
  const size_t count = static_cast<size_t>(num_probes_) * queries;
  SPLICE_ASSIGN_OR_RETURN(const std::vector<float> seen, ReadFloats(view.session, view.attention.lse + begin, count));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<float> all,
                          ReadFloats(view.session, static_cast<const float*>(view.scratch.lse->data()) + begin, count));
  const std::vector<float> edge = EdgeMass({seen, all, num_probes_, c.num_qo_heads, c.num_kv_heads});
  const std::vector<int32_t> restored = HeadsToRestore(edge, thresholds, left_);
  if (restored.empty()) return absl::OkStatus();
  left_ -= static_cast<int32_t>(restored.size());
  for (const int32_t h : restored) {
    view.heads[h].visibility = own;
    restored_.push_back(view.layer * view.whole.num_kv_heads + first + h);
  }
  return AttendAgain(view, view.attention, view.heads);
}

}  // namespace spl::engine
