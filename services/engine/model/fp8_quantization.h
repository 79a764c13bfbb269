// Rounds matrices to FP8 e4m3 with one scale for each row: what --quantize fp8 and splice quantize do.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/thread_pool.h"
#include "services/engine/model/float_matrix.h"
#include "services/engine/model/shard.h"

namespace spl::engine {

// Quantizes `count` values of a row: scale = largest magnitude / 448 (1 for a row of zeros), codes rounded to nearest
// even. Returns the scale. InvalidArgument: a value is NaN or infinite, or the scale is 0 in f32.
absl::StatusOr<float> QuantizeRow(const float* values, int64_t count, uint8_t* codes);

// Quantizes all rows in their whole width, and writes `columns` of them to `codes` [num_rows, columns.size()] and their
// scales to `scales` [num_rows]. InvalidArgument names the first row that QuantizeRow refuses.
absl::Status QuantizeRows(kernels::ThreadPool& pool, const FloatMatrix& matrix, const Range& columns, uint8_t* codes,
                          float* scales);

}  // namespace spl::engine
