#include <vector>

#include "kernels/common/e4m3.h"
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

  // It takes the same time. So tests of engines with this backend go through both.
  bool PrefersAdd(int64_t /*num_rows*/) const override { return true; }

  std::vector<float> values;  // [out_features, in_features]
};

float E4M3At(const ConstActivations& x, int64_t row, int64_t column, int64_t num_rows, int64_t width) {
  const int64_t group = x.scale_group == 0 ? 0 : column / x.scale_group;
  return kE4M3Values[static_cast<const uint8_t*>(x.data)[row * width + column]] *
         x.scales[group * E4M3Rows(num_rows) + row];
}

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
  const bool codes = a.x.dtype == DType::kE4M3;
  for (int64_t i = 0; i < a.num_rows; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t c = 0; c < k; ++c) {
        const float x = codes ? E4M3At(a.x, i, c, a.num_rows, k) : static_cast<const float*>(a.x.data)[i * k + c];
        sum += static_cast<double>(x) * w->values[j * k + c];
      }
      a.y[i * n + j] = static_cast<float>(sum + (a.bias != nullptr ? a.bias[j] : 0.0));
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
