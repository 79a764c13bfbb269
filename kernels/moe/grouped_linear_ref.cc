#include "kernels/common/status.h"
#include "kernels/moe/grouped_linear_host.h"

namespace spl::kernels::ref {

absl::StatusOr<std::unique_ptr<GroupedWeight>> PackGrouped(const GroupedWeightView& view) {
  return HostGroupedWeight::Make(view, [](const WeightView& w) { return ref::PackLinear(w); });
}

absl::Status GroupedLinear(const KernelContext& ctx, const GroupedLinearArgs& a) {
  if (absl::Status s = ValidateHostGroupedLinear(a); !s.ok() || a.num_places == 0) return s;
  const auto* w = dynamic_cast<const HostGroupedWeight*>(a.weight);
  if (w == nullptr) return InvalidCall("GroupedLinear: the weight was packed by another backend");
  for (int32_t e = 0; e < w->num_experts(); ++e) {
    for (int64_t p = a.offsets[e]; p < a.offsets[e + 1]; ++p) {
      const int64_t row = a.rows == nullptr ? p : a.rows[p];
      const absl::Status s =
          ref::Linear(ctx, {a.x + row * w->in_features(), &w->expert(e), nullptr, a.y + p * w->out_features(), 1});
      if (!s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

absl::Status CombineExperts(const KernelContext&, const CombineExpertsArgs& a) {
  if (absl::Status s = ValidateHostCombineExperts(a); !s.ok()) return s;
  for (int64_t i = 0; i < a.num_rows; ++i) {
    for (int64_t j = 0; j < a.width; ++j) {
      double sum = 0;
      for (int32_t k = 0; k < a.top_k; ++k) {
        sum += static_cast<double>(a.weights[i * a.top_k + k]) * a.y[a.places[i * a.top_k + k] * a.width + j];
      }
      a.out[i * a.width + j] = static_cast<float>(sum);
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
