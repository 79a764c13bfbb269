#include "services/engine/model/int4_quantization.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "kernels/common/ceil_div.h"
#include "services/base/status.h"
#include "services/engine/model/weight_quantization.h"

namespace spl::engine {
namespace {

constexpr int kScales = 18;
constexpr int kLanes = 8;  // sums that run beside each other, so that a compiler can use vectors

// Nearest whole number, ties to even, in [-8, 7]: adding 1.5 * 2^23 leaves no fraction bits. |x| < 2^22.
inline float RoundToCode(float x) {
  constexpr float kNoFraction = 12582912.0f;
  const float rounded = (x + kNoFraction) - kNoFraction;
  return std::min(std::max(rounded, -8.0f), 7.0f);
}

float SquaredError(const float* values, int64_t count, float scale) {
  const float inverse = 1.0f / scale;
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = values[i + lane], error = value - scale * RoundToCode(value * inverse);
      sums[lane] += error * error;
    }
  }
  float total = 0;
  for (; i < count; ++i) {
    const float error = values[i] - scale * RoundToCode(values[i] * inverse);
    total += error * error;
  }
  for (const float sum : sums) total += sum;
  return total;
}

// `values` divided by their largest magnitude: squares stay in the range of f32.
float BestScale(std::span<const float> values, float largest) {
  float best = 0, least = 0;
  for (int i = 0; i < kScales; ++i) {
    const float scale = kernels::ToFloat(kernels::ToBf16(largest / 7 * (1 - static_cast<float>(i) / 50)));
    const float error = SquaredError(values.data(), static_cast<int64_t>(values.size()), scale / largest);
    if (i > 0 && error >= least) continue;
    best = scale;
    least = error;
  }
  return best;
}

}  // namespace

absl::StatusOr<float> QuantizeInt4Group(const float* values, int64_t count, uint8_t* codes) {
  SPLICE_ASSIGN_OR_RETURN(const float largest, LargestMagnitude(values, count));
  if (largest < 0x1p-100f) {
    std::fill(codes, codes + count, uint8_t{8});
    return 1.0f;
  }
  float relative[kInt4Group];
  for (int64_t i = 0; i < count; ++i) relative[i] = values[i] / largest;
  const float scale = BestScale({relative, static_cast<size_t>(count)}, largest), inverse = 1.0f / (scale / largest);
  for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>(8 + RoundToCode(relative[i] * inverse));
  return scale;
}

absl::Status QuantizeInt4Rows(kernels::ThreadPool& pool, const FloatMatrix& matrix, const Range& columns,
                              uint8_t* codes, float* scales) {
  if (matrix.width % 8 != 0)
    return InvalidArgument("{} columns are no multiple of 8, which words of int4 codes have", matrix.width);
  if (columns.begin % kInt4Group != 0 || (columns.end % kInt4Group != 0 && columns.end != matrix.width))
    return InvalidArgument("a rank's columns [{}, {}) cut a group of {} that has one scale; use fewer ranks (--tp)",
                           columns.begin, columns.end, kInt4Group);
  const int64_t groups = kernels::CeilDiv(columns.size(), kInt4Group);
  return ForEachRow(pool, matrix, [&](int64_t row, std::span<const float> values) -> absl::Status {
    uint8_t of_group[kInt4Group];
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = columns.begin + g * kInt4Group, count = std::min(kInt4Group, columns.end - begin);
      SPLICE_ASSIGN_OR_RETURN(scales[row * groups + g], QuantizeInt4Group(values.data() + begin, count, of_group));
      uint8_t* to = codes + (row * columns.size() + g * kInt4Group) / 2;
      for (int64_t i = 0; i < count; i += 2) to[i / 2] = static_cast<uint8_t>(of_group[i] | of_group[i + 1] << 4);
    }
    return absl::OkStatus();
  });
}

}  // namespace spl::engine
