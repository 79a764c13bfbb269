// Activations in e4m3 with scales, as FP8 products take them ("dynamic" quantization): a scale for each row, or for
// each 128 columns of a row. For a group of columns J of row i:
//
//   m = max_{j in J} |x[i, j]|,  scale[i, J] = m / 448,  code[i, j] = e4m3(x[i, j] · (448 / m))
//
// in f32, codes rounded to nearest, ties to even. A group with m < 2^-100 has codes of 0 and the scale 1. A NaN or an
// infinity makes the row's results NaN.
//
// RmsNorm and SiluMul write such rows, too. On a device the codes of a row stand in the order of the columns of its FP8
// weights (gemm/fp8_gemm_cuda.h), on the host in their own.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/common/activations.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

inline constexpr int64_t kE4M3Group = 128;  // Activations::scale_group, unless it is 0

struct QuantizeRowsArgs {
  ConstActivations x;  // [num_rows, width], f32, or bf16 on a device
  Activations out;     // [num_rows, width], kE4M3; not x
  int64_t num_rows = 0;
  int64_t width = 0;  // on a device: a multiple of 16, at most 32,768
};

// InvalidArgument: a null tensor, no scales, another type or group, a shape out of range.
absl::Status ValidateQuantizeRows(const QuantizeRowsArgs& args);
// Checks a tensor that an operation may write as codes; `who` begins the message.
absl::Status ValidateE4M3(const Activations& out, const char* who);

namespace ref {
absl::Status QuantizeRows(const KernelContext& ctx, const QuantizeRowsArgs& args);
}
namespace cpu {
absl::Status QuantizeRows(const KernelContext& ctx, const QuantizeRowsArgs& args);
// Row `row` of `out`, which has num_rows of them.
void QuantizeRow(const float* x, int64_t width, const Activations& out, int64_t row, int64_t num_rows);
}  // namespace cpu

}  // namespace spl::kernels
