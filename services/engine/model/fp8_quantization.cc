#include "services/engine/model/fp8_quantization.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/common/e4m3.h"
#include "services/base/status.h"
#include "services/engine/model/weight_source.h"

namespace spl::engine {

bool IsQuantizedMatrix(const std::string& name) { return name.ends_with("_proj.weight"); }

absl::StatusOr<float> QuantizeRow(const float* values, int64_t count, uint8_t* codes) {
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    finite &= std::isfinite(values[i]);
    largest = std::max(largest, std::fabs(values[i]));
  }
  if (!finite) return InvalidArgument("a weight is NaN or infinite");
  const float scale = largest == 0 ? 1.0f : largest / kernels::kE4M3Max;
  if (!std::isnormal(scale)) return InvalidArgument("the largest weight, {}, is too small to quantize", largest);
  for (int64_t i = 0; i < count; ++i) codes[i] = kernels::FloatToE4M3(values[i] / scale);
  return scale;
}

absl::Status QuantizeRows(kernels::ThreadPool& pool, const FloatMatrix& matrix, const Range& columns, uint8_t* codes,
                          float* scales) {
  std::vector<absl::Status> refused(static_cast<size_t>(matrix.num_rows));
  pool.ParallelFor(matrix.num_rows, [&](int64_t row, int) {
    std::vector<float> values(static_cast<size_t>(matrix.width));
    for (int64_t i = 0; i < matrix.width; ++i)
      values[i] = ElementAsFloat(matrix.data, matrix.dtype, row * matrix.width + i);
    std::vector<uint8_t> of_row(static_cast<size_t>(matrix.width));
    const absl::StatusOr<float> scale = QuantizeRow(values.data(), matrix.width, of_row.data());
    if (!scale.ok()) {
      refused[row] = scale.status();
      return;
    }
    scales[row] = *scale;
    std::memcpy(codes + row * columns.size(), of_row.data() + columns.begin, static_cast<size_t>(columns.size()));
  });
  for (int64_t row = 0; row < matrix.num_rows; ++row) {
    if (!refused[row].ok()) return Annotate(refused[row], fmt::format("row {}", row));
  }
  return absl::OkStatus();
}

}  // namespace spl::engine
