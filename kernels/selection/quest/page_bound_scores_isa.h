// The leaf code of CPU PageBoundScores, compiled once per instruction set (page_bound_scores_isa.cc).
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

// Consecutive granules of one page (page_bound_scores.h) against the query heads of a group.
struct BoundGranules {
  const void* bounds = nullptr;  // [num_granules, 2, head_dim] of dtype
  const float* q = nullptr;      // [num_heads, head_dim], scaled by sm_scale
  float* scores = nullptr;       // out [num_granules]
  DType dtype = DType::kBF16;
  int32_t num_granules = 0;
  int32_t num_heads = 0;
  int32_t head_dim = 0;
};

struct PageBoundKernels {
  void (*score)(const BoundGranules& granules);
};

SPLICE_DECLARE_ISA_TABLES(PageBoundKernels, kPageBounds)

}  // namespace spl::kernels::cpu
