#include <cstring>
#include <string>
#include <vector>

#include "kernels/common/e4m3.h"
#include "kernels/common/status.h"
#include "kernels/gemm/gemm_validate.h"

namespace spl::kernels {

namespace {

absl::Status ValidateInt4(const WeightView& w) {
  if (w.dtype != DType::kInt4) {
    if (w.zeros == nullptr && w.column_order == nullptr) return absl::OkStatus();
    return InvalidCall("PackLinear: ", std::string(DTypeName(w.dtype)), " weight with zeros or a column order");
  }
  if (w.in_features % 2 != 0) return InvalidCall("PackLinear: an int4 weight of ", w.in_features, " columns");
  for (int64_t i = 0; w.zeros != nullptr && i < w.out_features * w.num_scale_groups(); ++i) {
    if (w.zeros[i] > 16) return InvalidCall("PackLinear: zero ", i, " is ", static_cast<int>(w.zeros[i]));
  }
  if (w.column_order == nullptr) return absl::OkStatus();
  std::vector<bool> seen(static_cast<size_t>(w.in_features));
  for (int64_t k = 0; k < w.in_features; ++k) {
    const int32_t column = w.column_order[k];
    if (column < 0 || column >= w.in_features || seen[column])
      return InvalidCall("PackLinear: the column order is no permutation: ", column, " at ", k);
    seen[column] = true;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateScales(const WeightView& w) {
  if (IsQuantizedType(w.dtype) != (w.scales != nullptr)) {
    return InvalidCall("PackLinear: ", std::string(DTypeName(w.dtype)), " weight with",
                       w.scales == nullptr ? "out scales" : " scales");
  }
  if (w.scale_group < 0 || w.scale_group % kScaleGroupStep != 0) {
    return InvalidCall("PackLinear: a scale for ", w.scale_group, " columns, not a multiple of ", kScaleGroupStep);
  }
  return ValidateInt4(w);
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
  if (a.num_rows > 0 && a.x.dtype == DType::kE4M3 && a.x.scales == nullptr)
    return InvalidCall("Linear: x in e4m3 without scales");
  return absl::OkStatus();
}

static void WidenInt4(const WeightView& w, int64_t begin, int64_t count, float* out) {
  const auto* bytes = static_cast<const uint8_t*>(w.data);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = begin + i, row = at / w.in_features, column = at % w.in_features;
    const int64_t group = row * w.num_scale_groups() + (w.scale_group == 0 ? 0 : column / w.scale_group);
    const int code = at % 2 == 0 ? bytes[at / 2] & 15 : bytes[at / 2] >> 4,
              zero = w.zeros == nullptr ? 8 : w.zeros[group];
    out[i] = static_cast<float>(code - zero) * w.scales[group];
  }
}

// Byte copies, because a tensor in a mapped checkpoint may lie at any address.
void WidenWeight(const WeightView& w, int64_t begin, int64_t count, float* out) {
  if (w.dtype == DType::kInt4) return WidenInt4(w, begin, count, out);
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
