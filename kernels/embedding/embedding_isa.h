// The leaf code of CPU row lookups, compiled once per instruction set (embedding_isa.cc).
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/isa_table.h"

namespace spl::kernels::cpu {

struct EmbeddingKernels {
  // Elements [at, at + width) of the table, widened.
  void (*widen_row)(const void* table, DType dtype, int64_t at, float* out, int64_t width);
};

SPLICE_DECLARE_ISA_TABLES(EmbeddingKernels, kEmbedding)

}  // namespace spl::kernels::cpu
