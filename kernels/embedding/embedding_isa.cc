#include "kernels/embedding/embedding_isa.h"

#include "kernels/common/simd.h"

namespace spl::kernels::cpu::SPLICE_ISA {
namespace {

void WidenRow(const void* table, DType dtype, int64_t at, float* out, int64_t width) {
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) Store(out + j, LoadAs(table, dtype, at + j, kLanes));
  if (const int n = static_cast<int>(width - j); n > 0) StorePartial(out + j, LoadAs(table, dtype, at + j, n), n);
}

}  // namespace

extern const EmbeddingKernels kEmbedding;
const EmbeddingKernels kEmbedding = {WidenRow};

}  // namespace spl::kernels::cpu::SPLICE_ISA
