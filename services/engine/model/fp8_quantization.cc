#include "services/engine/model/fp8_quantization.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/common/e4m3.h"
#include "services/base/status.h"

namespace spl::engine {

absl::StatusOr<float> QuantizeRow(const float* values, int64_t count, uint8_t* codes) {
  SPLICE_ASSIGN_OR_RETURN(const float largest, LargestMagnitude(values, count));
  const float scale = largest == 0 ? 1.0f : largest / kernels::kE4M3Max;
  if (!std::isnormal(scale)) return InvalidArgument("the largest weight, {}, is too small to quantize", largest);
  for (int64_t i = 0; i < count; ++i) codes[i] = kernels::FloatToE4M3(values[i] / scale);
  return scale;
}

absl::Status QuantizeRows(kernels::ThreadPool& pool, const FloatMatrix& matrix, const Range& columns, uint8_t* codes,
                          float* scales) {
  return ForEachRow(pool, matrix, [&](int64_t row, std::span<const float> values) -> absl::Status {
    std::vector<uint8_t> of_row(static_cast<size_t>(matrix.width));
    SPLICE_ASSIGN_OR_RETURN(scales[row], QuantizeRow(values.data(), matrix.width, of_row.data()));
    std::memcpy(codes + row * columns.size(), of_row.data() + columns.begin, static_cast<size_t>(columns.size()));
    return absl::OkStatus();
  });
}

}  // namespace spl::engine
