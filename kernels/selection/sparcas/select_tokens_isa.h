// The leaf code of CPU SelectTokens, compiled once per instruction set (select_tokens_isa.cc).
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

// Consecutive tiles of compact keys (compact_keys.h) against the query heads of a group. Scores are in units of log2: q
// is scaled by sm_scale · log2(e).
struct CompactTiles {
  const void* keys = nullptr;  // [num_tiles, num_dims, 64] of dtype
  const float* q = nullptr;    // [num_heads, num_dims]
  float* scores = nullptr;     // out [num_heads, score_stride]: the first 64 num_tiles of each
  int64_t score_stride = 0;
  DType dtype = DType::kBF16;
  int32_t num_tiles = 0;
  int32_t num_heads = 0;
  int32_t num_dims = 0;
};

struct SelectTokensKernels {
  void (*score_tiles)(const CompactTiles& tiles);
  // scores [64 num_tiles] become 2^(score - their maximum), in place; returns their sum.
  float (*exp_sum)(float* scores, int64_t num_tiles);
  // out[j] = Σ_h factors[h] weights[h][j] for j < 64 num_tiles, heads in ascending order. out may be weights[0].
  void (*add_heads)(const float* weights, int64_t stride, const float* factors, int32_t num_heads, int64_t num_tiles,
                    float* out);
};

SPLICE_DECLARE_ISA_TABLES(SelectTokensKernels, kSelectTokens)

}  // namespace spl::kernels::cpu
