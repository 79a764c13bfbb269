#include "kernels/moe/routing.h"

#include <algorithm>

#include "kernels/common/status.h"

namespace spl::kernels {

absl::Status ValidateRouteExperts(const RouteExpertsArgs& a) {
  if (a.num_experts < 1 || a.num_experts > kMoeExpertsMax) {
    return InvalidCall("RouteExperts: ", a.num_experts, " experts, not in [1, ", kMoeExpertsMax, "]");
  }
  if (a.top_k < 1 || a.top_k > std::min(a.num_experts, kMoeTopKMax)) {
    return InvalidCall("RouteExperts: top ", a.top_k, " of ", a.num_experts, " experts");
  }
  if (a.num_rows < 0 || a.num_rows > INT32_MAX / a.top_k) return InvalidCall("RouteExperts: ", a.num_rows, " rows");
  if (a.offsets == nullptr) return InvalidCall("RouteExperts: null offsets");
  if (a.num_rows > 0 && (a.logits == nullptr || a.expert_ids == nullptr || a.weights == nullptr || a.rows == nullptr ||
                         a.places == nullptr)) {
    return InvalidCall("RouteExperts: null tensor");
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels
