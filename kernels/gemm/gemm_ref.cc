#include <vector>

#include "kernels/common/status.h"
#include "kernels/gemm/gemm_validate.h"

namespace spl::kernels::ref {
namespace {

class PlainWeight final : public LinearWeight {
 public:
  explicit PlainWeight(const WeightView& view)
      : LinearWeight(view.out_features, view.in_features), values(view.out_features * view.in_features) {
    if (view.column_order == nullptr) {
      WidenWeight(view, 0, static_cast<int64_t>(values.size()), values.data());
      return;
    }
    std::vector<float> row(static_cast<size_t>(view.in_features));
    for (int64_t n = 0; n < view.out_features; ++n) {
      WidenWeight(view, n * view.in_features, view.in_features, row.data());
      for (int64_t k = 0; k < view.in_features; ++k) values[n * view.in_features + view.column_order[k]] = row[k];
    }
  }

  std::vector<float> values;  // [out_features, in_features]
};

}  // namespace

absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(const WeightView& view) {
  if (absl::Status s = ValidateWeight(view); !s.ok()) return s;
  return std::unique_ptr<LinearWeight>(std::make_unique<PlainWeight>(view));
}

absl::Status Linear(const KernelContext&, const LinearArgs& a) {
  if (absl::Status s = ValidateLinear(a); !s.ok()) return s;
  const auto* w = dynamic_cast<const PlainWeight*>(a.weight);
  if (w == nullptr) return InvalidCall("Linear: the weight was packed by another backend");
  const int64_t n = w->out_features(), k = w->in_features();
  for (int64_t i = 0; i < a.num_rows; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = a.bias != nullptr ? a.bias[j] : 0.0;
      for (int64_t c = 0; c < k; ++c) sum += static_cast<double>(a.x[i * k + c]) * w->values[j * k + c];
      a.y[i * n + j] = static_cast<float>(sum);
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
