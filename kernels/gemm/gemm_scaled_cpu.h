// Products on the CPU with weights whose codes have scales (FP8, int4): the panels and scales of a packed weight, and
// how a product is cut into tasks and its sums are scaled. gemm_fp8_cpu and gemm_int4_cpu say how codes are multiplied.
//
// Order of sums  that of gemm_fp8_isa.h: fixed for a row, whatever the number of rows or threads.
#pragma once

#include <algorithm>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/common/buffer.h"
#include "kernels/common/ceil_div.h"
#include "kernels/common/parallel.h"
#include "kernels/common/scratch.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_bf16_cpu.h"
#include "kernels/gemm/gemm_fp8_isa.h"

namespace spl::kernels::cpu {

// Packed codes, `panel_bytes` of them for 32 columns of the weight, and the scales of each panel's columns. The form is
// the same for every instruction set.
class ScaledWeight : public LinearWeight {
 public:
  // True: rows of x are rounded to bf16, as they are for bf16 weights.
  bool round_x() const { return round_x_; }
  int64_t num_panels() const { return (out_features() + kBf16PanelColumns - 1) / kBf16PanelColumns; }
  int64_t depth_blocks() const { return (in_features() + kBf16DepthBlock - 1) / kBf16DepthBlock; }
  int64_t panel_bytes() const { return depth_blocks() * block_bytes_; }
  int64_t num_groups() const { return num_groups_; }
  int64_t group_blocks() const { return group_blocks_; }  // depth blocks of a scale group; the last one may be short
  // One panel's codes, at depth block `block`.
  const uint8_t* codes(int64_t panel, int64_t block) const {
    return static_cast<const uint8_t*>(codes_->data()) + panel * panel_bytes() + block * block_bytes_;
  }
  // [32], of one panel's columns.
  const float* scales(int64_t panel, int64_t group) const {
    return static_cast<const float*>(scales_->data()) + (panel * num_groups_ + group) * kBf16PanelColumns;
  }

 protected:
  // block_bytes: codes of a depth block of a panel.
  ScaledWeight(const WeightView& view, bool round_x, int64_t block_bytes);
  // Makes room for the codes, which are 0, and packs the scales. ResourceExhausted: no memory.
  absl::Status Allocate(const WeightView& view);
  uint8_t* codes() { return static_cast<uint8_t*>(codes_->data()); }

 private:
  const bool round_x_;
  const int64_t block_bytes_, num_groups_, group_blocks_;
  std::unique_ptr<Buffer> codes_, scales_;
};

// Rows up to which codes are widened beside the products: in registers, once for 12 rows, or with AMX block by block.
// With more rows, they are widened once for all, to memory that stays in a cache; with 32 that is still slower
// (docs/results/2026-11-26-cpu-decoding.md).
inline constexpr int64_t kFewRows = kBf16RowBlock;

// `Codes` below is how one weight's codes are read:
//   MultiplyF32(x, x_stride, num_rows, depth, panel, block, sums): as Fp8GemmKernels::multiply, from depth block
//   `block`
//
//   BeginBf16(num_rows), MultiplyBf16(x, num_rows, depth_blocks, panel, block, sums), EndBf16(): as those of
//   Fp8Bf16Kernels
//
//   Widen(panel, begin, end, out): depth blocks [begin, end) as a bf16 panel has them

// One call with x in f32. Rows and panels do not interact, so a task is any part of both.
template <typename Codes>
struct ScaledF32Product {
  const LinearArgs& args;
  const ScaledWeight& weight;
  const Codes& codes;
  const Fp8GemmKernels& kernels;

  void Run(int64_t begin, int64_t end, int64_t panel) const {
    thread_local Scratch sums_scratch, totals_scratch;
    const int64_t k = weight.in_features(), n = weight.out_features(), num_rows = end - begin;
    float* sums = sums_scratch.Floats(static_cast<size_t>(num_rows * kBf16PanelColumns));
    float* totals = totals_scratch.Floats(static_cast<size_t>(num_rows * kBf16PanelColumns));
    for (int64_t g = 0; g < weight.num_groups(); ++g) {
      const int64_t block = g * weight.group_blocks(), depth = block * kBf16DepthBlock;
      codes.MultiplyF32(args.x + begin * k + depth, k, num_rows,
                        std::min(weight.group_blocks() * kBf16DepthBlock, k - depth), panel, block, sums);
      kernels.scale(sums, num_rows, weight.scales(panel, g), g > 0, totals);
    }
    const int64_t column = panel * kBf16PanelColumns;
    kernels.store(totals, num_rows, std::min(kBf16PanelColumns, n - column),
                  args.bias == nullptr ? nullptr : args.bias + column, args.y + begin * n + column, n);
  }
};

// One call with x rounded to bf16.
template <typename Codes>
struct ScaledBf16Product {
  const LinearArgs& args;
  const ScaledWeight& weight;
  const Codes& codes;
  const Fp8GemmKernels& kernels;
  const Bf16GemmKernels& bf16_kernels;
  bool few_rows = false;    // codes are widened beside the products
  const bf16* x = nullptr;  // packed rows

  const bf16* Rows(int64_t row, int64_t block) const {
    return x + (row / kBf16RowBlock * weight.depth_blocks() + block) * kBf16PairElements;
  }

  void Store(int64_t row, int64_t num_rows, int64_t panel, const float* totals) const {
    const int64_t column = panel * kBf16PanelColumns, n = weight.out_features();
    kernels.store(totals, num_rows, std::min(kBf16PanelColumns, n - column),
                  args.bias == nullptr ? nullptr : args.bias + column, args.y + row * n + column, n);
  }

  // Few rows, begin is a multiple of 32.
  void RunFewRows(int64_t begin, int64_t end, int64_t panel) const {
    alignas(64) float sums[kBf16SumsOfPanel], totals[kBf16SumsOfPanel];
    for (int64_t g = 0; g < weight.num_groups(); ++g) {
      const int64_t block = g * weight.group_blocks();
      codes.MultiplyBf16(Rows(begin, block), end - begin,
                         std::min(weight.group_blocks(), weight.depth_blocks() - block), panel, block, sums);
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
      for (int64_t p = 0; p < num_panels; ++p) codes.Widen(panel + p, block, last, wide + p * part * kBf16PairElements);
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
    if (few_rows) {
      codes.BeginBf16(end - begin);
      for (int64_t p = panel; p < panel_end; ++p) RunFewRows(begin, end, p);
      codes.EndBf16();
      return;
    }
    // The last rows of many, if they are few: one panel at a time, whose widened part stays in the first-level cache.
    const int64_t at_once = end - begin <= kBf16RowBlock ? 1 : kBf16GroupPanels;
    for (int64_t p = panel; p < panel_end; p += at_once) RunWidened(begin, end, p, std::min(at_once, panel_end - p));
  }
};

// Calls run(row_begin, row_end, panel, panel_end) for every task.
template <typename Run>
void ForEachScaledTask(const KernelContext& ctx, int64_t num_rows, const ScaledWeight& w, const Run& run) {
  const PanelCut cut = CutPanels(num_rows, w.num_panels(), w.panel_bytes(), NumThreads(ctx));
  const int64_t row_tasks = CeilDiv(num_rows, cut.rows), panel_tasks = CeilDiv(w.num_panels(), cut.panels);
  ParallelTasks(ctx, panel_tasks * row_tasks, [&](int64_t task) {
    const int64_t row = task % row_tasks * cut.rows, panel = task / row_tasks * cut.panels;
    run(row, std::min(num_rows, row + cut.rows), panel, std::min(w.num_panels(), panel + cut.panels));
  });
}

// Linear with a weight whose codes `codes` reads. Unimplemented: the weight rounds x, and ctx.isa has no bf16 product.
template <typename Codes>
absl::Status RunScaled(const KernelContext& ctx, const LinearArgs& a, const ScaledWeight& w, const Codes& codes) {
  const Fp8GemmKernels& kernels = Fp8GemmKernelsFor(ctx.isa);
  if (!w.round_x()) {
    const ScaledF32Product<Codes> product{.args = a, .weight = w, .codes = codes, .kernels = kernels};
    ForEachScaledTask(ctx, a.num_rows, w, [&](int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
      for (int64_t p = panel; p < panel_end; ++p) product.Run(row, row_end, p);
    });
    return absl::OkStatus();
  }
#if defined(__x86_64__)
  if (const Bf16GemmKernels* bf16_kernels = Bf16GemmKernelsFor(ctx.isa)) {
    thread_local Scratch scratch;
    const ScaledBf16Product<Codes> product{.args = a,
                                           .weight = w,
                                           .codes = codes,
                                           .kernels = kernels,
                                           .bf16_kernels = *bf16_kernels,
                                           .few_rows = a.num_rows <= kFewRows,
                                           .x = PackBf16Rows(ctx, a, *bf16_kernels, scratch)};
    ForEachScaledTask(ctx, a.num_rows, w, [&](int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
      product.Run(row, row_end, panel, panel_end);
    });
    return absl::OkStatus();
  }
#endif
  return absl::UnimplementedError(absl::StrCat("Linear: a weight packed for products of bf16, and there is none on ",
                                               std::string(CpuIsaName(ctx.isa))));
}

}  // namespace spl::kernels::cpu
