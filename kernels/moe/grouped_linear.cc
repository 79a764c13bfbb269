#include "kernels/moe/grouped_linear.h"

#include "kernels/common/status.h"
#include "kernels/moe/grouped_linear_host.h"
#include "kernels/moe/routing.h"

namespace spl::kernels {

absl::Status ValidateGroupedWeight(const GroupedWeightView& w) {
  if (w.num_experts < 1 || w.num_experts > kMoeExpertsMax || w.out_features <= 0 || w.in_features <= 0) {
    return InvalidCall("PackGrouped: shape [", w.num_experts, ", ", w.out_features, ", ", w.in_features, "]");
  }
  if (w.data == nullptr) return InvalidCall("PackGrouped: null weight");
  return absl::OkStatus();
}

absl::Status ValidateGroupedLinear(const GroupedLinearArgs& a) {
  if (a.weight == nullptr) return InvalidCall("GroupedLinear: null weight");
  if (a.num_places < 0 || a.num_places > INT32_MAX) return InvalidCall("GroupedLinear: ", a.num_places, " places");
  if (a.num_places == 0) return absl::OkStatus();
  if (a.x.data == nullptr || a.y.data == nullptr || a.offsets == nullptr)
    return InvalidCall("GroupedLinear: null tensor");
  if (a.x.data == a.y.data) return InvalidCall("GroupedLinear: y aliases x");
  if (a.num_x_rows < 1 || (a.rows == nullptr && a.num_x_rows != a.num_places)) {
    return InvalidCall("GroupedLinear: x has ", a.num_x_rows, " rows for ", a.num_places, " places");
  }
  return absl::OkStatus();
}

absl::Status ValidateHostGroupedLinear(const GroupedLinearArgs& a) {
  if (absl::Status s = ValidateGroupedLinear(a); !s.ok() || a.num_places == 0) return s;
  const int32_t num_experts = a.weight->num_experts();
  if (a.offsets[0] != 0 || a.offsets[num_experts] != a.num_places) {
    return InvalidCall("GroupedLinear: offsets span [", a.offsets[0], ", ", a.offsets[num_experts], ") of ",
                       a.num_places, " places");
  }
  for (int32_t e = 0; e < num_experts; ++e) {
    if (a.offsets[e] > a.offsets[e + 1]) return InvalidCall("GroupedLinear: the offset of expert ", e, " descends");
  }
  for (int64_t p = 0; a.rows != nullptr && p < a.num_places; ++p) {
    if (a.rows[p] < 0 || a.rows[p] >= a.num_x_rows) {
      return InvalidCall("GroupedLinear: place ", p, " reads row ", a.rows[p], " of ", a.num_x_rows);
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateCombineExperts(const CombineExpertsArgs& a) {
  if (a.num_rows < 0 || a.top_k < 1 || a.top_k > kMoeTopKMax || a.width <= 0) {
    return InvalidCall("CombineExperts: ", a.num_rows, " rows of ", a.width, ", top ", a.top_k);
  }
  if (a.num_rows == 0) return absl::OkStatus();
  if (a.y.data == nullptr || a.places == nullptr || a.weights == nullptr || a.out.data == nullptr) {
    return InvalidCall("CombineExperts: null tensor");
  }
  if (a.y.data == a.out.data) return InvalidCall("CombineExperts: out aliases y");
  return absl::OkStatus();
}

absl::Status ValidateHostCombineExperts(const CombineExpertsArgs& a) {
  if (absl::Status s = ValidateCombineExperts(a); !s.ok()) return s;
  for (int64_t pair = 0; pair < a.num_rows * a.top_k; ++pair) {
    if (a.places[pair] < 0 || a.places[pair] >= a.num_rows * a.top_k) {
      return InvalidCall("CombineExperts: place ", a.places[pair], " of ", a.num_rows * a.top_k);
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels
