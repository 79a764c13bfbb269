#include "kernels/gemm/gemm_fp8_cpu.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/common/ceil_div.h"
#include "kernels/common/host_buffer.h"
#include "kernels/common/parallel.h"
#include "kernels/common/scratch.h"
#include "kernels/gemm/gemm_bf16_cpu.h"
#include "kernels/gemm/gemm_fp8_isa.h"

namespace spl::kernels::cpu {
namespace {

// Rows up to which codes are widened in registers, once for 12 rows. With more rows, they are widened once for all, to
// memory that stays in a cache.
constexpr int64_t kRowsInRegisters = 12;

// One call with x in f32. Rows and panels do not interact, so a task is any part of both.
struct F32Product {
  const LinearArgs& args;
  const Fp8Weight& weight;
  const Fp8GemmKernels& kernels;

  void Run(int64_t begin, int64_t end, int64_t panel) const {
    thread_local Scratch sums_scratch, totals_scratch;
    const int64_t k = weight.in_features(), n = weight.out_features(), num_rows = end - begin;
    float* sums = sums_scratch.Floats(static_cast<size_t>(num_rows * kBf16PanelColumns));
    float* totals = totals_scratch.Floats(static_cast<size_t>(num_rows * kBf16PanelColumns));
    for (int64_t g = 0; g < weight.num_groups(); ++g) {
      const int64_t block = g * weight.group_blocks(), depth = block * kBf16DepthBlock;
      kernels.multiply(args.x + begin * k + depth, k, num_rows,
                       std::min(weight.group_blocks() * kBf16DepthBlock, k - depth),
                       weight.panel(panel) + block * kBf16PairElements, sums);
      kernels.scale(sums, num_rows, weight.scales(panel, g), g > 0, totals);
    }
    const int64_t column = panel * kBf16PanelColumns;
    kernels.store(totals, num_rows, std::min(kBf16PanelColumns, n - column),
                  args.bias == nullptr ? nullptr : args.bias + column, args.y + begin * n + column, n);
  }
};

#if defined(__x86_64__)
// One call with x rounded to bf16.
struct Bf16Product {
  const LinearArgs& args;
  const Fp8Weight& weight;
  const Fp8GemmKernels& kernels;
  const Bf16GemmKernels& bf16_kernels;
  bool in_registers = false;  // codes are widened in registers
  const bf16* x = nullptr;    // packed rows

  const bf16* Rows(int64_t row, int64_t block) const {
    return x + (row / kBf16RowBlock * weight.depth_blocks() + block) * kBf16PairElements;
  }

  void Store(int64_t row, int64_t num_rows, int64_t panel, const float* totals) const {
    const int64_t column = panel * kBf16PanelColumns, n = weight.out_features();
    kernels.store(totals, num_rows, std::min(kBf16PanelColumns, n - column),
                  args.bias == nullptr ? nullptr : args.bias + column, args.y + row * n + column, n);
  }

  // Few rows, begin is a multiple of 32.
  void RunInRegisters(int64_t begin, int64_t end, int64_t panel) const {
    alignas(64) float sums[kBf16SumsOfPanel], totals[kBf16SumsOfPanel];
    for (int64_t g = 0; g < weight.num_groups(); ++g) {
      const int64_t block = g * weight.group_blocks();
      avx512_bf16::kFp8Bf16Gemm.multiply(
          {.x = Rows(begin, block),
           .num_rows = end - begin,
           .panel = weight.panel(panel) + block * kBf16PairElements,
           .depth_blocks = std::min(weight.group_blocks(), weight.depth_blocks() - block),
           .sums = sums});
      kernels.scale(sums, end - begin, weight.scales(panel, g), g > 0, totals);
    }
    Store(begin, end - begin, panel, totals);
  }

  // Rows [begin, end) times panels whose codes are widened part by part of the depth. The sums of a scale group and the
  // totals of all rows wait between the parts.
  void RunWidened(int64_t begin, int64_t end, int64_t panel, int64_t num_panels) const {
    thread_local Scratch wide_scratch, sums_scratch, totals_scratch;
    const int64_t blocks = weight.depth_blocks();
    const int64_t part = end - begin <= kBf16RowBlock ? kBf16InnerBlocks : kBf16OuterBlocks;
    auto* wide = static_cast<bf16*>(
        wide_scratch.Bytes(static_cast<size_t>(num_panels * part * kBf16PairElements) * sizeof(bf16)));
    const auto waiting = static_cast<size_t>(CeilDiv(end - begin, kBf16RowBlock) * num_panels * kBf16SumsOfPanel);
    float* sums = sums_scratch.Floats(waiting);
    float* totals = totals_scratch.Floats(waiting);
    for (int64_t block = 0; block < blocks; block += part) {
      const int64_t last = std::min(blocks, block + part);
      for (int64_t p = 0; p < num_panels; ++p) {
        avx512_bf16::kFp8Bf16Gemm.widen(weight.panel(panel + p) + block * kBf16PairElements,
                                        (last - block) * kBf16PairElements, wide + p * part * kBf16PairElements);
      }
      for (int64_t row = begin; row < end; row += kBf16RowBlock) {
        const int64_t at = (row - begin) / kBf16RowBlock * num_panels * kBf16SumsOfPanel;
        MultiplyPart(row, end, panel, num_panels, block, last, wide, part, sums + at, totals + at);
      }
    }
    for (int64_t row = begin; row < end; row += kBf16RowBlock) {
      const float* at = totals + (row - begin) / kBf16RowBlock * num_panels * kBf16SumsOfPanel;
      for (int64_t p = 0; p < num_panels; ++p) {
        Store(row, std::min(kBf16RowBlock, end - row), panel + p, at + p * kBf16SumsOfPanel);
      }
    }
  }

  // One row block over depth blocks [begin, end), which `wide` begins with; `part` depth blocks lie between panels.
  void MultiplyPart(int64_t row, int64_t last_row, int64_t panel, int64_t num_panels, int64_t begin, int64_t end,
                    const bf16* wide, int64_t part, float* sums, float* totals) const {
    const int64_t num_rows = std::min(kBf16RowBlock, last_row - row), group_blocks = weight.group_blocks();
    for (int64_t block = begin; block < end;) {
      const int64_t group = block / group_blocks, group_begin = group * group_blocks;
      const int64_t group_end = std::min(group_begin + group_blocks, weight.depth_blocks());
      const int64_t next = std::min({block + kBf16InnerBlocks, group_end, end});
      bf16_kernels.multiply({.x = Rows(row, block),
                             .next_x = row + num_rows < last_row ? Rows(row + kBf16RowBlock, block) : nullptr,
                             .num_rows = num_rows,
                             .w = wide + (block - begin) * kBf16PairElements,
                             .w_stride = part * kBf16PairElements,
                             .num_panels = num_panels,
                             .depth_blocks = next - block,
                             .add = block > group_begin,
                             .sums = sums});
      block = next;
      if (block < group_end) continue;
      for (int64_t p = 0; p < num_panels; ++p) {
        kernels.scale(sums + p * kBf16SumsOfPanel, num_rows, weight.scales(panel + p, group), group > 0,
                      totals + p * kBf16SumsOfPanel);
      }
    }
  }

  void Run(int64_t begin, int64_t end, int64_t panel, int64_t panel_end) const {
    if (in_registers) {
      for (int64_t p = panel; p < panel_end; ++p) RunInRegisters(begin, end, p);
      return;
    }
    // Few rows: one panel at a time, whose widened part stays in the first-level cache.
    const int64_t at_once = end - begin <= kBf16RowBlock ? 1 : kBf16GroupPanels;
    for (int64_t p = panel; p < panel_end; p += at_once) RunWidened(begin, end, p, std::min(at_once, panel_end - p));
  }
};
#endif

// Calls run(row_begin, row_end, panel, panel_end) for every task.
template <typename Run>
void ForEachTask(const KernelContext& ctx, int64_t num_rows, const Fp8Weight& w, const Run& run) {
  const PanelCut cut = CutPanels(num_rows, w.num_panels(), w.panel_bytes(), NumThreads(ctx));
  const int64_t row_tasks = CeilDiv(num_rows, cut.rows), panel_tasks = CeilDiv(w.num_panels(), cut.panels);
  ParallelTasks(ctx, panel_tasks * row_tasks, [&](int64_t task) {
    const int64_t row = task % row_tasks * cut.rows, panel = task / row_tasks * cut.panels;
    run(row, std::min(num_rows, row + cut.rows), panel, std::min(w.num_panels(), panel + cut.panels));
  });
}

}  // namespace

Fp8Weight::Fp8Weight(const WeightView& view, bool round_x)
    : LinearWeight(view.out_features, view.in_features),
      round_x_(round_x),
      num_groups_(view.num_scale_groups()),
      group_blocks_(view.scale_group == 0 ? depth_blocks() : view.scale_group / kBf16DepthBlock) {
  static_assert(kScaleGroupStep == kBf16DepthBlock);
}

absl::StatusOr<std::unique_ptr<LinearWeight>> Fp8Weight::Pack(const WeightView& view, bool round_x) {
  std::unique_ptr<Fp8Weight> weight(new Fp8Weight(view, round_x));
  absl::StatusOr<std::unique_ptr<Buffer>> codes =
      AllocateHostBuffer(static_cast<size_t>(weight->num_panels() * weight->panel_bytes()));
  if (!codes.ok()) return codes.status();
  weight->codes_ = std::move(codes).value();
  absl::StatusOr<std::unique_ptr<Buffer>> scales = AllocateHostBuffer(
      static_cast<size_t>(weight->num_panels() * weight->num_groups() * kBf16PanelColumns) * sizeof(float));
  if (!scales.ok()) return scales.status();
  weight->scales_ = std::move(scales).value();
  weight->Fill(view);
  return std::unique_ptr<LinearWeight>(std::move(weight));
}

void Fp8Weight::Fill(const WeightView& view) {
  const int64_t k = in_features();
  auto* scales = static_cast<float*>(scales_->data());
  for (int64_t n = 0; n < out_features(); ++n) {
    const int64_t panel = n / kBf16PanelColumns, column = n % kBf16PanelColumns;
    const auto* from = static_cast<const uint8_t*>(view.data) + n * k;
    uint8_t* to = static_cast<uint8_t*>(codes_->data()) + panel * panel_bytes() + column / 16 * kBf16TileElements +
                  column % 16 * 2;
    for (int64_t d = 0; d < k; ++d) {
      const int64_t in_block = d % kBf16DepthBlock;
      to[d / kBf16DepthBlock * kBf16PairElements + in_block / 2 * 32 + in_block % 2] = from[d];
    }
    for (int64_t g = 0; g < num_groups_; ++g) {
      scales[(panel * num_groups_ + g) * kBf16PanelColumns + column] = view.scales[n * num_groups_ + g];
    }
  }
}

absl::Status RunFp8(const KernelContext& ctx, const LinearArgs& a, const Fp8Weight& w) {
  const Fp8GemmKernels& kernels = Fp8GemmKernelsFor(ctx.isa);
  if (!w.round_x()) {
    const F32Product product{.args = a, .weight = w, .kernels = kernels};
    ForEachTask(ctx, a.num_rows, w, [&](int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
      for (int64_t p = panel; p < panel_end; ++p) product.Run(row, row_end, p);
    });
    return absl::OkStatus();
  }
#if defined(__x86_64__)
  if (const Bf16GemmKernels* bf16_kernels = Bf16GemmKernelsFor(ctx.isa)) {
    thread_local Scratch scratch;
    // AMX multiplies tiles in memory, and sums in another order than VDPBF16PS.
    const bool in_registers = a.num_rows <= kRowsInRegisters && bf16_kernels == &avx512_bf16::kBf16Gemm;
    const Bf16Product product{.args = a,
                              .weight = w,
                              .kernels = kernels,
                              .bf16_kernels = *bf16_kernels,
                              .in_registers = in_registers,
                              .x = PackBf16Rows(ctx, a, *bf16_kernels, scratch)};
    ForEachTask(ctx, a.num_rows, w, [&](int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
      product.Run(row, row_end, panel, panel_end);
    });
    return absl::OkStatus();
  }
#endif
  return absl::UnimplementedError(absl::StrCat(
      "Linear: an FP8 weight packed for products of bf16, and there is none on ", std::string(CpuIsaName(ctx.isa))));
}

}  // namespace spl::kernels::cpu
