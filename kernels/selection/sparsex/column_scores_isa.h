// The leaf code of CPU column scores, compiled once per instruction set (column_scores_isa.cc).
#pragma once

#include <cstdint>

#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

// Rows against the keys of one page. Units of log2, as in PrefillPage.
struct ColumnPage {
  const float* q = nullptr;           // [num_rows, head_dim], scaled by sm_scale · log2(e)
  const float* lse = nullptr;         // [num_rows], in log2
  const uint64_t* visible = nullptr;  // [num_rows]: bit j is slot j
  const float* keys = nullptr;        // [head_dim, 64]
  float* sums = nullptr;              // [64], added to
  int32_t num_rows = 0;
  int32_t head_dim = 0;
};

struct ColumnScoresKernels {
  void (*add_page)(const ColumnPage& page);
};

SPLICE_DECLARE_ISA_TABLES(ColumnScoresKernels, kColumnScores)

}  // namespace spl::kernels::cpu
