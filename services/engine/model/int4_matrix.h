// int4 matrices of a checkpoint: published layouts, read into the one form that kernels take (gemm.h, WeightView).
//
// Layouts   a matrix is [n, k], groups of its columns have a scale; eight codes make a word, the first in its low bits
//   compressed-tensors  X.weight_packed [n, k / 8]: words along k, code plus 8; X.weight_scale [n, groups];
//                       X.weight_shape [2]; X.weight_zero_point [n / 8, groups]: words along n, plus 8;
//                       X.weight_g_idx [k]: no entry is -1
//   gptq                X.qweight [k / 8, n]: words along k; X.scales [groups, n]; X.qzeros [groups, n / 8]: words
//                       along n, zero point less 1 (checkpoint_format "gptq") or zero point ("gptq_v2"); X.g_idx [k]
//   awq                 X.qweight [k, n / 8]: words along n, whose codes are those of n + 0, 2, 4, 6, 1, 3, 5, 7;
//                       X.qzeros [groups, n / 8]: likewise; X.scales [groups, n]
//
// g_idx is the group of each column. Where it does not ascend (act-order), columns are sorted by it, and the order goes
// with the weight.
//
// Errors    InvalidArgument and NotFound name the tensor: it is missing, has another shape or type, a scale is no
//           positive number, groups are not of one size, or a rank's columns cut a group
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/thread_pool.h"
#include "services/engine/model/checkpoint.h"
#include "services/engine/model/weight_quantization.h"
#include "services/engine/model/weight_source.h"

namespace spl::engine {

// True if the checkpoint has the matrix `name` ("….weight") in int4.
bool HasInt4Matrix(const Checkpoint& checkpoint, const WeightQuantization& quantization, const std::string& name);

// Type of such a matrix, whose shape is checked.
absl::StatusOr<MatrixType> Int4MatrixType(const Checkpoint& checkpoint, const WeightQuantization& quantization,
                                          const std::string& name, const std::vector<int64_t>& shape);

// Writes the codes of a part, [rows, columns / 2] bytes, to `codes`. Appends its scales and zero points to `scales`,
// and sets scales.column_order.
absl::Status ReadInt4Matrix(kernels::ThreadPool& pool, const Checkpoint& checkpoint,
                            const WeightQuantization& quantization, const MatrixPart& part, uint8_t* codes,
                            MatrixScales& scales);

}  // namespace spl::engine
