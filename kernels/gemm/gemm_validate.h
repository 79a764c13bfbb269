#pragma once

#include "kernels/gemm/gemm.h"

namespace spl::kernels {

absl::Status ValidateWeight(const WeightView& weight);
// Scales, zeros and column order; called by ValidateWeight. Reads column_order.
absl::Status ValidateScales(const WeightView& weight);
absl::Status ValidateLinear(const LinearArgs& args);

// Widens elements [begin, begin + count) of the weight as it is stored, scales applied, to f32.
void WidenWeight(const WeightView& weight, int64_t begin, int64_t count, float* out);

}  // namespace spl::kernels
