#include <cstring>
#include <string>

#include "kernels/common/e4m3.h"
#include "kernels/common/status.h"
#include "kernels/gemm/gemm_validate.h"

namespace spl::kernels {

absl::Status ValidateScales(const WeightView& w) {
  if ((w.dtype == DType::kE4M3) != (w.scales != nullptr)) {
    return InvalidCall("PackLinear: ", std::string(DTypeName(w.dtype)), " weight with",
                       w.scales == nullptr ? "out scales" : " scales");
  }
  if (w.scale_group < 0 || w.scale_group % kScaleGroupStep != 0) {
    return InvalidCall("PackLinear: a scale for ", w.scale_group, " columns, not a multiple of ", kScaleGroupStep);
  }
  return absl::OkStatus();
}

absl::Status ValidateWeight(const WeightView& w) {
  if (w.out_features <= 0 || w.in_features <= 0) {
    return InvalidCall("PackLinear: shape [", w.out_features, ", ", w.in_features, "]");
  }
  if (w.data == nullptr) return InvalidCall("PackLinear: null weight");
  return ValidateScales(w);
}

absl::Status ValidateLinear(const LinearArgs& a) {
  if (a.weight == nullptr) return InvalidCall("Linear: null weight");
  if (a.num_rows < 0) return InvalidCall("Linear: num_rows is ", a.num_rows);
  if (a.num_rows > 0 && (a.x.data == nullptr || a.y.data == nullptr)) return InvalidCall("Linear: null tensor");
  if (a.num_rows > 0 && a.x.data == a.y.data) return InvalidCall("Linear: y aliases x");
  return absl::OkStatus();
}

// Byte copies, because a tensor in a mapped checkpoint may lie at any address.
void WidenWeight(const WeightView& w, int64_t begin, int64_t count, float* out) {
  const auto* bytes = static_cast<const unsigned char*>(w.data) + begin * static_cast<int64_t>(DTypeBytes(w.dtype));
  if (w.dtype == DType::kF32) {
    std::memcpy(out, bytes, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  if (w.dtype == DType::kE4M3) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = (begin + i) / w.in_features, column = (begin + i) % w.in_features;
      const int64_t group = w.scale_group == 0 ? 0 : column / w.scale_group;
      out[i] = kE4M3Values[bytes[i]] * w.scales[row * w.num_scale_groups() + group];
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + 2 * i, sizeof(bits));
    out[i] = w.dtype == DType::kBF16 ? ToFloat(bf16{bits}) : HalfToFloat(bits);
  }
}

}  // namespace spl::kernels
