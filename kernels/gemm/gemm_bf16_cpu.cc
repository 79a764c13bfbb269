#include "kernels/gemm/gemm_bf16_cpu.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/common/ceil_div.h"
#include "kernels/common/host_buffer.h"
#include "kernels/common/parallel.h"
#include "kernels/common/scratch.h"
#include "kernels/gemm/gemm_validate.h"

namespace spl::kernels::cpu {
namespace {

// Rows that share one reading of a group when a weight is deeper than a group: their sums wait in scratch memory
// between the parts of the depth, 1 KiB a row.
constexpr int64_t kRowsOfTask = 1024;
// A task that reads less than this takes less than 3 us, and is not worth handing to another core.
constexpr int64_t kTaskBytesMin = 32 << 10;

struct Product {
  const LinearArgs& args;
  const Bf16Weight& weight;
  const Bf16GemmKernels& kernels;
  const bf16* x = nullptr;  // packed rows

  int64_t row_stride() const { return weight.depth_blocks() * kBf16PairElements; }  // between row blocks

  // Multiplies rows [row, row + num_rows), at most 32 and from a multiple of 32, by panels [panel, panel + num_panels)
  // over depth blocks [begin, end). The later rows, up to last_row, come next. from_memory: no rows have read the
  // panels.
  void Multiply(int64_t row, int64_t num_rows, int64_t last_row, int64_t panel, int64_t num_panels, int64_t begin,
                int64_t end, bool from_memory, float* sums) const {
    // A single tile of rows reads each panel once, so depth is not cut.
    const int64_t blocks = num_rows <= kBf16TileRows ? end - begin : kBf16InnerBlocks;
    const bf16* rows = x + row / kBf16RowBlock * row_stride();
    for (int64_t block = begin; block < end; block += blocks) {
      const int64_t at = block * kBf16PairElements;
      kernels.multiply({.x = rows + at,
                        .next_x = row + num_rows < last_row ? rows + row_stride() + at : nullptr,
                        .num_rows = num_rows,
                        .w = weight.panel(panel) + at,
                        .w_stride = weight.panel_elements(),
                        .num_panels = num_panels,
                        .depth_blocks = std::min(blocks, end - block),
                        .from_memory = from_memory,
                        .add = block > 0,
                        .sums = sums});
    }
  }

  void Store(int64_t row, int64_t num_rows, int64_t panel, int64_t num_panels, const float* sums) const {
    const int64_t n = weight.out_features();
    for (int64_t p = 0; p < num_panels; ++p) {
      const int64_t column = (panel + p) * kBf16PanelColumns;
      kernels.store(sums + p * kBf16SumsOfPanel, num_rows, std::min(kBf16PanelColumns, n - column),
                    args.bias == nullptr ? nullptr : args.bias + column, args.y + row * n + column, n);
    }
  }

  // Rows [begin, end) times a group of panels. The depth is cut where the group would outgrow its cache.
  void RunGroup(int64_t begin, int64_t end, int64_t panel, int64_t num_panels) const {
    thread_local Scratch scratch;
    const int64_t blocks = weight.depth_blocks();
    const bool whole = blocks <= kBf16OuterBlocks || end - begin <= kBf16RowBlock;
    const int64_t waiting = whole ? 1 : CeilDiv(end - begin, kBf16RowBlock);  // row blocks whose sums are kept
    float* sums = scratch.Floats(static_cast<size_t>(waiting * num_panels * kBf16SumsOfPanel));
    const int64_t depth = whole ? blocks : kBf16OuterBlocks;
    for (int64_t block = 0; block < blocks; block += depth) {
      const int64_t last = std::min(blocks, block + depth);
      for (int64_t row = begin; row < end; row += kBf16RowBlock) {
        const int64_t num_rows = std::min(kBf16RowBlock, end - row);
        float* at = whole ? sums : sums + (row - begin) / kBf16RowBlock * num_panels * kBf16SumsOfPanel;
        Multiply(row, num_rows, end, panel, num_panels, block, last, row == begin, at);
        if (last == blocks) Store(row, num_rows, panel, num_panels, at);
      }
    }
  }
};

}  // namespace

const Bf16GemmKernels* Bf16GemmKernelsFor(CpuIsa isa) {
#if defined(__x86_64__)
  switch (std::min(isa, DetectCpuIsa())) {
    case CpuIsa::kAmx:
      return &amx::kBf16Gemm;
    case CpuIsa::kAvx512Bf16:
      return &avx512_bf16::kBf16Gemm;
    default:
      break;
  }
#endif
  return nullptr;
}

// Many rows: each task has a group of panels, with as many groups for every thread; if there are fewer groups than
// threads, rows are cut as well. Few rows: reading the weight is the cost, and two tasks per thread even out the
// threads' shares of the memory bandwidth.
PanelCut CutPanels(int64_t num_rows, int64_t panels, int64_t panel_bytes, int64_t threads) {
  if (num_rows <= kBf16RowBlock) {
    const int64_t worth = CeilDiv(kTaskBytesMin, panel_bytes);
    return {kBf16RowBlock, threads == 1 ? panels : std::max(worth, CeilDiv(panels, 2 * threads))};
  }
  const int64_t rounds = CeilDiv(panels, kBf16GroupPanels * threads);
  const PanelCut cut{kRowsOfTask, std::min(kBf16GroupPanels, CeilDiv(panels, rounds * threads))};
  const int64_t groups = CeilDiv(panels, cut.panels);
  if (groups >= threads) return cut;
  const int64_t rows = CeilDiv(num_rows, CeilDiv(threads, groups));
  return {std::min(kRowsOfTask, CeilDiv(rows, kBf16RowBlock) * kBf16RowBlock), cut.panels};
}

absl::StatusOr<std::unique_ptr<LinearWeight>> Bf16Weight::Pack(const WeightView& view) {
  std::unique_ptr<Bf16Weight> weight(new Bf16Weight(view));
  const size_t bytes = static_cast<size_t>(weight->num_panels() * weight->panel_elements()) * sizeof(bf16);
  absl::StatusOr<std::unique_ptr<Buffer>> data = AllocateHostBuffer(bytes);
  if (!data.ok()) return data.status();
  weight->data_ = std::move(data).value();
  weight->Fill(view);
  return std::unique_ptr<LinearWeight>(std::move(weight));
}

void Bf16Weight::Fill(const WeightView& view) {
  const int64_t k = in_features();
  std::vector<float> wide(static_cast<size_t>(k));
  for (int64_t n = 0; n < out_features(); ++n) {
    WidenWeight(view, n * k, k, wide.data());
    const int64_t column = n % kBf16PanelColumns;
    bf16* to = static_cast<bf16*>(data_->data()) + n / kBf16PanelColumns * panel_elements() +
               column / 16 * kBf16TileElements + column % 16 * 2;
    for (int64_t d = 0; d < k; ++d) {
      const int64_t block = d / kBf16DepthBlock, in_block = d % kBf16DepthBlock;
      to[block * kBf16PairElements + in_block / 2 * 32 + in_block % 2] = ToBf16(wide[static_cast<size_t>(d)]);
    }
  }
}

const bf16* PackBf16Rows(const KernelContext& ctx, const LinearArgs& a, const Bf16GemmKernels& kernels,
                         Scratch& scratch) {
  const int64_t k = a.weight->in_features(), row_blocks = CeilDiv(a.num_rows, kBf16RowBlock);
  const int64_t stride = CeilDiv(k, kBf16DepthBlock) * kBf16PairElements;
  auto* x = static_cast<bf16*>(scratch.Bytes(static_cast<size_t>(row_blocks * stride) * sizeof(bf16)));
  const int64_t blocks_at_once = std::max<int64_t>(1, (int64_t{1} << 16) / (k * kBf16RowBlock));
  ParallelRows(ctx, row_blocks, blocks_at_once, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t row = b * kBf16RowBlock;
      kernels.pack_rows(a.x + row * k, std::min(kBf16RowBlock, a.num_rows - row), k, x + b * stride);
    }
  });
  return x;
}

absl::Status RunBf16(const KernelContext& ctx, const LinearArgs& a, const Bf16Weight& w) {
  const Bf16GemmKernels* kernels = Bf16GemmKernelsFor(ctx.isa);
  if (kernels == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("Linear: a weight packed in bf16, and no product of bf16 on ", std::string(CpuIsaName(ctx.isa))));
  }
  thread_local Scratch scratch;
  Product product{.args = a, .weight = w, .kernels = *kernels};
  product.x = PackBf16Rows(ctx, a, *kernels, scratch);

  const PanelCut cut =
      CutPanels(a.num_rows, w.num_panels(), w.panel_elements() * int64_t{sizeof(bf16)}, NumThreads(ctx));
  const int64_t row_tasks = CeilDiv(a.num_rows, cut.rows), panel_tasks = CeilDiv(w.num_panels(), cut.panels);
  // The row tasks of the same panels follow each other: the second finds them in a cache that cores share.
  ParallelTasks(ctx, panel_tasks * row_tasks, [&](int64_t task) {
    const int64_t row = task % row_tasks * cut.rows, row_end = std::min(a.num_rows, row + cut.rows);
    const int64_t panel = task / row_tasks * cut.panels, panel_end = std::min(w.num_panels(), panel + cut.panels);
    for (int64_t p = panel; p < panel_end; p += kBf16GroupPanels) {
      product.RunGroup(row, row_end, p, std::min(kBf16GroupPanels, panel_end - p));
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
