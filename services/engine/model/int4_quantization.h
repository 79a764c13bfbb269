// Rounds matrices to int4 with one scale for each row and group of kInt4Group columns: what --quantize int4 and splice
// quantize --format int4 do.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/thread_pool.h"
#include "services/engine/model/float_matrix.h"
#include "services/engine/model/shard.h"

namespace spl::engine {

// Quantizes `count` values, at most kInt4Group, that share a scale: code = 8 + value / scale, rounded to nearest (ties
// to even) and clamped to [0, 15]. Returns the scale, a bf16 number. It is the one with the least sum of squared errors
// among (largest magnitude / 7) * (1 - i / 50) for i = 0 … 17, each rounded to bf16; of equals the first. A group of
// zeros, or of values below 2^-100, has the scale 1. InvalidArgument: a value is NaN or infinite.
absl::StatusOr<float> QuantizeInt4Group(const float* values, int64_t count, uint8_t* codes);

// Quantizes columns [columns.begin, columns.end) of all rows: writes `codes` [num_rows, columns.size() / 2], two a
// byte, and `scales` [num_rows, ceil(columns.size() / kInt4Group)]. InvalidArgument names the first row with a value
// that is NaN or infinite, or says that the width is no multiple of 8 or the columns cut a group.
absl::Status QuantizeInt4Rows(kernels::ThreadPool& pool, const FloatMatrix& matrix, const Range& columns,
                              uint8_t* codes, float* scales);

}  // namespace spl::engine
