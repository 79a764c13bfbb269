// Matrices that are quantized here (--quantize, splice quantize), row by row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/dtype.h"
#include "kernels/common/thread_pool.h"

namespace spl::engine {

// True for the matrices of attention, feed-forward and experts. Embedding, head and routers keep their type, as in
// published folders.
bool IsQuantizedMatrix(const std::string& name);

// Row-major values on the host, f32, bf16 or f16; `data` may be unaligned.
struct FloatMatrix {
  const std::byte* data = nullptr;
  kernels::DType dtype = kernels::DType::kF32;
  int64_t num_rows = 0;
  int64_t width = 0;
};

// Calls quantize(row, values) for every row, on the threads of `pool`. Returns the error of the first row that has one,
// with the row's number.
absl::Status ForEachRow(kernels::ThreadPool& pool, const FloatMatrix& matrix,
                        const std::function<absl::Status(int64_t row, std::span<const float> values)>& quantize);

// The largest magnitude of `count` weights; 0 if there are none. InvalidArgument: one is NaN or infinite.
absl::StatusOr<float> LargestMagnitude(const float* values, int64_t count);

}  // namespace spl::engine
