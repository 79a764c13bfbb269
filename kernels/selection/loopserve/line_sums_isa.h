// The leaf code of the CPU line weights, compiled once per instruction set (line_sums_isa.cc).
#pragma once

#include <cstdint>

#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

// Rows against the keys of one page. Units of log2, as in PrefillPage.
struct LinePage {
  const float* q = nullptr;     // [num_rows, head_dim], scaled by sm_scale · log2(e)
  const float* lse = nullptr;   // [num_rows], in log2
  const float* keys = nullptr;  // [head_dim, 64]
  float* weights = nullptr;     // [num_rows, 64]: 2^(score - lse), for any order of row and key
  int32_t num_rows = 0;
  int32_t head_dim = 0;
};

struct LineSumsKernels {
  void (*page_weights)(const LinePage& page);
};

SPLICE_DECLARE_ISA_TABLES(LineSumsKernels, kLineSums)

}  // namespace spl::kernels::cpu
