// The leaf code of the CPU mixture of experts, compiled once per instruction set (moe_isa.cc).
#pragma once

#include <cstdint>

#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

struct MoeKernels {
  // out[j] = Σ_k weights[k] · y[places[k] * width + j]; one row.
  void (*combine_row)(const float* y, const int32_t* places, const float* weights, int32_t top_k, int64_t width,
                      float* out);
};

SPLICE_DECLARE_ISA_TABLES(MoeKernels, kMoe)

}  // namespace spl::kernels::cpu
