#include "kernels/gemm/gemm_fp8_cpu.h"

#include <utility>

namespace spl::kernels::cpu {
namespace {

struct Fp8Codes {
  const Fp8Weight& weight;
  const Fp8GemmKernels& kernels;
#if defined(__x86_64__)
  const Fp8Bf16Kernels& bf16_kernels;  // used where the isa has products of bf16
#endif

  void MultiplyF32(const float* x, int64_t x_stride, int64_t num_rows, int64_t depth, int64_t panel, int64_t block,
                   float* sums) const {
    kernels.multiply(x, x_stride, num_rows, depth, weight.codes(panel, block), sums);
  }
#if defined(__x86_64__)
  void BeginBf16(int64_t num_rows) const { bf16_kernels.begin(num_rows); }
  void EndBf16() const { bf16_kernels.end(); }
  void MultiplyBf16(const bf16* x, int64_t num_rows, int64_t depth_blocks, int64_t panel, int64_t block,
                    float* sums) const {
    bf16_kernels.multiply({.x = x,
                           .num_rows = num_rows,
                           .panel = weight.codes(panel, block),
                           .depth_blocks = depth_blocks,
                           .sums = sums});
  }
  void Widen(int64_t panel, int64_t begin, int64_t end, bf16* out) const {
    bf16_kernels.widen(weight.codes(panel, begin), (end - begin) * kBf16PairElements, out);
  }
#endif
};

}  // namespace

absl::StatusOr<std::unique_ptr<LinearWeight>> Fp8Weight::Pack(const WeightView& view, bool round_x) {
  std::unique_ptr<Fp8Weight> weight(new Fp8Weight(view, round_x));
  if (absl::Status s = weight->Allocate(view); !s.ok()) return s;
  weight->Fill(view);
  return std::unique_ptr<LinearWeight>(std::move(weight));
}

void Fp8Weight::Fill(const WeightView& view) {
  const int64_t k = in_features();
  for (int64_t n = 0; n < out_features(); ++n) {
    const int64_t column = n % kBf16PanelColumns;
    const auto* from = static_cast<const uint8_t*>(view.data) + n * k;
    uint8_t* to = codes() + n / kBf16PanelColumns * panel_bytes() + column / 16 * kBf16TileElements + column % 16 * 2;
    for (int64_t d = 0; d < k; ++d) {
      const int64_t in_block = d % kBf16DepthBlock;
      to[d / kBf16DepthBlock * kBf16PairElements + in_block / 2 * 32 + in_block % 2] = from[d];
    }
  }
}

absl::Status RunFp8(const KernelContext& ctx, const LinearArgs& a, const Fp8Weight& w) {
#if defined(__x86_64__)
  const bool amx = Bf16GemmKernelsFor(ctx.isa) == &amx::kBf16Gemm;
  return RunScaled(ctx, a, w,
                   Fp8Codes{w, Fp8GemmKernelsFor(ctx.isa), amx ? amx::kFp8Bf16Gemm : avx512_bf16::kFp8Bf16Gemm});
#else
  return RunScaled(ctx, a, w, Fp8Codes{w, Fp8GemmKernelsFor(ctx.isa)});
#endif
}

}  // namespace spl::kernels::cpu
