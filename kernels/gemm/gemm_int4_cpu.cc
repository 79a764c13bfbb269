#include "kernels/gemm/gemm_int4_cpu.h"

#include <algorithm>
#include <utility>

namespace spl::kernels::cpu {
namespace {

struct Int4Codes {
  const Int4Weight& weight;
  const Int4GemmKernels& kernels;
#if defined(__x86_64__)
  const Int4Bf16Kernels& bf16_kernels;  // used where the isa has products of bf16
#endif

  const uint8_t* Offsets(int64_t panel, int64_t block) const {
    return weight.offsets(panel, block / weight.group_blocks());
  }
  void MultiplyF32(const float* x, int64_t x_stride, int64_t num_rows, int64_t depth, int64_t panel, int64_t block,
                   float* sums) const {
    kernels.multiply(x, x_stride, num_rows, depth, weight.codes(panel, block), Offsets(panel, block), sums);
  }
#if defined(__x86_64__)
  void BeginBf16(int64_t num_rows) const { bf16_kernels.begin(num_rows); }
  void EndBf16() const { bf16_kernels.end(); }
  void MultiplyBf16(const bf16* x, int64_t num_rows, int64_t depth_blocks, int64_t panel, int64_t block,
                    float* sums) const {
    bf16_kernels.multiply({.x = x,
                           .num_rows = num_rows,
                           .panel = weight.codes(panel, block),
                           .offsets = Offsets(panel, block),
                           .depth_blocks = depth_blocks,
                           .sums = sums});
  }
  void Widen(int64_t panel, int64_t begin, int64_t end, bf16* out) const {
    for (int64_t block = begin; block < end;) {
      const int64_t group_end = (block / weight.group_blocks() + 1) * weight.group_blocks();
      const int64_t next = std::min(end, group_end);
      bf16_kernels.widen(weight.codes(panel, block), Offsets(panel, block), next - block,
                         out + (block - begin) * kBf16PairElements);
      block = next;
    }
  }
#endif
};

// Rows of x with their columns in the order of the weight's.
const float* Gather(const KernelContext& ctx, const LinearArgs& a, const std::vector<int32_t>& order,
                    Scratch& scratch) {
  const auto k = static_cast<int64_t>(order.size());
  float* gathered = scratch.Floats(static_cast<size_t>(a.num_rows * k));
  ParallelRows(ctx, a.num_rows, (int64_t{1} << 16) / k, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < k; ++i) gathered[row * k + i] = a.x[row * k + order[i]];
    }
  });
  return gathered;
}

}  // namespace

Int4Weight::Int4Weight(const WeightView& view, bool round_x)
    : ScaledWeight(view, round_x, kInt4BlockBytes),
      symmetric_(view.zeros == nullptr),
      offsets_(static_cast<size_t>(symmetric_ ? kBf16PanelColumns : num_panels() * num_groups() * kBf16PanelColumns),
               uint8_t{8}) {
  if (view.column_order != nullptr) column_order_.assign(view.column_order, view.column_order + view.in_features);
}

absl::StatusOr<std::unique_ptr<LinearWeight>> Int4Weight::Pack(const WeightView& view, bool round_x) {
  std::unique_ptr<Int4Weight> weight(new Int4Weight(view, round_x));
  if (absl::Status s = weight->Allocate(view); !s.ok()) return s;
  weight->Fill(view);
  return std::unique_ptr<LinearWeight>(std::move(weight));
}

void Int4Weight::Fill(const WeightView& view) {
  const int64_t k = in_features();
  for (int64_t n = 0; n < out_features(); ++n) {
    const int64_t panel = n / kBf16PanelColumns, column = n % kBf16PanelColumns;
    const int shift = column < 16 ? 0 : 4;
    const auto* from = static_cast<const uint8_t*>(view.data) + n * (k / 2);
    uint8_t* to = codes() + panel * panel_bytes() + column % 16 * 2;
    for (int64_t d = 0; d < k; d += 2) {  // depth blocks follow each other: 16 pairs of 32 bytes
      to[d / 2 * 32] |= static_cast<uint8_t>((from[d / 2] & 15) << shift);
      to[d / 2 * 32 + 1] |= static_cast<uint8_t>(from[d / 2] >> 4 << shift);
    }
    for (int64_t g = 0; !symmetric_ && g < num_groups(); ++g) {
      offsets_[(panel * num_groups() + g) * kBf16PanelColumns + column] =
          static_cast<uint8_t>(16 - view.zeros[n * num_groups() + g]);
    }
  }
}

absl::Status RunInt4(const KernelContext& ctx, const LinearArgs& a, const Int4Weight& w) {
#if defined(__x86_64__)
  const bool amx = Bf16GemmKernelsFor(ctx.isa) == &amx::kBf16Gemm;
  const Int4Codes codes{w, Int4GemmKernelsFor(ctx.isa), amx ? amx::kInt4Bf16Gemm : avx512_bf16::kInt4Bf16Gemm};
#else
  const Int4Codes codes{w, Int4GemmKernelsFor(ctx.isa)};
#endif
  if (w.column_order().empty()) return RunScaled(ctx, a, w, codes);
  thread_local Scratch scratch;
  LinearArgs gathered = a;
  gathered.x = Gather(ctx, a, w.column_order(), scratch);
  return RunScaled(ctx, gathered, w, codes);
}

}  // namespace spl::kernels::cpu
