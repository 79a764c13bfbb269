// Products with FP8 weights by TDPBF16PS: every code is exact in bf16. Compiled with AMX and AVX-512; leaf code on raw
// pointers only (see common/simd.h).
#include "kernels/gemm/gemm_fp8_isa.h"
#include "kernels/gemm/gemm_fp8_widen.h"
#include "kernels/gemm/gemm_tiles_amx.h"

namespace spl::kernels::cpu::amx {
namespace {

void Multiply(const Fp8Block& b) {
  const auto widen = [&](int64_t block, bf16* out) {
    WidenFp8(b.panel + block * kBf16PairElements, kBf16PairElements, out);
  };
  MultiplyCodes(b.x, b.num_rows, b.depth_blocks, widen, b.sums);
}

}  // namespace

extern const Fp8Bf16Kernels kFp8Bf16Gemm;
const Fp8Bf16Kernels kFp8Bf16Gemm = {WidenFp8, ConfigureTiles, Multiply, ReleaseTiles};

}  // namespace spl::kernels::cpu::amx
