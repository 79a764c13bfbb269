// The leaf code of the CPU activation, compiled once per instruction set (activation_isa.cc).
#pragma once

#include <cstdint>

#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

struct ActivationKernels {
  void (*silu_mul)(const float* gate, const float* up, float* out, int64_t width);  // one row
};

SPLICE_DECLARE_ISA_TABLES(ActivationKernels, kActivation)

}  // namespace spl::kernels::cpu
