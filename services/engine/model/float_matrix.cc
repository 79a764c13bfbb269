#include "services/engine/model/float_matrix.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "services/base/status.h"
#include "services/engine/model/weight_source.h"

namespace spl::engine {

bool IsQuantizedMatrix(const std::string& name) { return name.ends_with("_proj.weight"); }

absl::Status ForEachRow(kernels::ThreadPool& pool, const FloatMatrix& matrix,
                        const std::function<absl::Status(int64_t row, std::span<const float> values)>& quantize) {
  std::vector<absl::Status> refused(static_cast<size_t>(matrix.num_rows));
  pool.ParallelFor(matrix.num_rows, [&](int64_t row, int) {
    std::vector<float> values(static_cast<size_t>(matrix.width));
    for (int64_t i = 0; i < matrix.width; ++i)
      values[i] = ElementAsFloat(matrix.data, matrix.dtype, row * matrix.width + i);
    refused[row] = quantize(row, values);
  });
  for (int64_t row = 0; row < matrix.num_rows; ++row) {
    if (!refused[row].ok()) return Annotate(refused[row], fmt::format("row {}", row));
  }
  return absl::OkStatus();
}

absl::StatusOr<float> LargestMagnitude(const float* values, int64_t count) {
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    finite &= std::isfinite(values[i]);
    largest = std::max(largest, std::fabs(values[i]));
  }
  if (!finite) return InvalidArgument("a weight is NaN or infinite");
  return largest;
}

}  // namespace spl::engine
