// Products with int4 weights by TDPBF16PS: a code less its zero point is exact in bf16. Compiled with AMX and AVX-512;
// leaf code on raw pointers only (see common/simd.h).
#include "kernels/gemm/gemm_int4_isa.h"
#include "kernels/gemm/gemm_int4_widen.h"
#include "kernels/gemm/gemm_tiles_amx.h"

namespace spl::kernels::cpu::amx {
namespace {

void Multiply(const Int4Block& b) {
  const Int4Widener widener(b.offsets);
  const auto widen = [&](int64_t block, bf16* out) { widener.Block(b.panel + block * kInt4BlockBytes, out); };
  MultiplyCodes(b.x, b.num_rows, b.depth_blocks, widen, b.sums);
}

}  // namespace

extern const Int4Bf16Kernels kInt4Bf16Gemm;
const Int4Bf16Kernels kInt4Bf16Gemm = {WidenInt4, ConfigureTiles, Multiply, ReleaseTiles};

}  // namespace spl::kernels::cpu::amx
