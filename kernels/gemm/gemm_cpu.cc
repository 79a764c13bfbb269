#include "kernels/gemm/gemm_cpu.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/common/ceil_div.h"
#include "kernels/common/e4m3.h"
#include "kernels/common/parallel.h"
#include "kernels/common/scratch.h"
#include "kernels/common/status.h"
#include "kernels/gemm/gemm_bf16_cpu.h"
#include "kernels/gemm/gemm_fp8_cpu.h"
#include "kernels/gemm/gemm_int4_cpu.h"
#include "kernels/gemm/gemm_isa.h"
#include "kernels/gemm/gemm_validate.h"

namespace spl::kernels::cpu {
namespace {

// A task below this many multiply-adds (3 us or more for one row: it must read as many weights) is not worth handing to
// another core.
constexpr int64_t kTaskWorkMin = int64_t{1} << 16;

// How one product is cut into tasks: blocks of rows x slices of columns.
struct Grid {
  int64_t rows = 0;     // per task
  int64_t columns = 0;  // per task
  int64_t row_tasks = 0, column_tasks = 0;
};

// Column blocks per slice such that the busiest thread has the fewest; of equals the fewest slices. At most two slices
// per thread are tried, and at most `slices_max`.
int64_t SliceBlocks(int64_t num_blocks, int64_t row_tasks, int64_t threads, int64_t slices_max) {
  int64_t best = num_blocks, best_span = num_blocks * CeilDiv(row_tasks, threads);
  for (int64_t slices = 2; slices <= std::min(slices_max, CeilDiv(2 * threads, row_tasks)); ++slices) {
    const int64_t blocks = CeilDiv(num_blocks, slices);
    const int64_t span = blocks * CeilDiv(CeilDiv(num_blocks, blocks) * row_tasks, threads);
    if (span < best_span) {
      best = blocks;
      best_span = span;
    }
  }
  return best;
}

// Many rows: blocks of rows, each over the whole weight, as many for every thread. Few rows: every row, over slices of
// the weight, since then reading the weight is the cost. Neither changes a result: rows and columns do not interact.
Grid MakeGrid(int64_t num_rows, int64_t n, int64_t k, int64_t column_block, int64_t rows_max, int64_t threads) {
  constexpr int64_t kRowsWorthATask = 32;
  Grid g;
  if (threads == 1 || num_rows >= kRowsWorthATask * threads) {
    g.row_tasks = threads * CeilDiv(num_rows, rows_max * threads);
    g.rows = CeilDiv(num_rows, g.row_tasks);
    g.columns = n;
  } else {
    g.rows = std::min(num_rows, rows_max);
    const int64_t row_tasks = CeilDiv(num_rows, g.rows);
    const int64_t useful = std::max<int64_t>(num_rows * n * k / kTaskWorkMin / row_tasks, 1);
    g.columns = column_block * SliceBlocks(CeilDiv(n, column_block), row_tasks, threads, useful);
    g.columns = std::min(g.columns, n);
  }
  g.row_tasks = CeilDiv(num_rows, g.rows);
  g.column_tasks = CeilDiv(n, g.columns);
  return g;
}

class FirstError {
 public:
  void Set(absl::Status status) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (status_.ok()) status_ = std::move(status);
  }
  absl::Status Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return status_;
  }

 private:
  std::mutex mutex_;  // guards status_
  absl::Status status_;
};

// oneDNN writes contiguous rows, so a slice of several rows goes through scratch memory.
absl::Status MultiplySlice(const OneDnnMatrix& matrix, const LinearArgs& a, int64_t k, int64_t n, int64_t row,
                           int64_t num_rows, int64_t column, int64_t num_columns) {
  thread_local Scratch scratch;
  const float* x = a.x + row * k;
  float* y = a.y + row * n + column;
  if (num_rows == 1 || num_columns == n) return matrix.Multiply(x, num_rows, column, num_columns, a.bias, y);
  float* part = scratch.Floats(static_cast<size_t>(num_rows * num_columns));
  absl::Status status = matrix.Multiply(x, num_rows, column, num_columns, a.bias, part);
  for (int64_t i = 0; i < num_rows; ++i) {
    std::memcpy(y + i * n, part + i * num_columns, static_cast<size_t>(num_columns) * sizeof(float));
  }
  return status;
}

absl::Status RunOneDnn(const KernelContext& ctx, const LinearArgs& a, const OneDnnWeight& w) {
  const int64_t n = w.out_features(), k = w.in_features();
  const Grid g = MakeGrid(a.num_rows, n, k, w.matrix->column_block(), kOneDnnRowsMax, NumThreads(ctx));
  FirstError error;
  ParallelTasks(ctx, g.row_tasks * g.column_tasks, [&](int64_t task) {
    const int64_t row = task / g.column_tasks * g.rows, column = task % g.column_tasks * g.columns;
    absl::Status s = MultiplySlice(*w.matrix, a, k, n, row, std::min(g.rows, a.num_rows - row), column,
                                   std::min(g.columns, n - column));
    if (!s.ok()) error.Set(std::move(s));
  });
  return error.Take();
}

absl::Status RunPanels(const KernelContext& ctx, const LinearArgs& a, const PanelWeight& w) {
  const int64_t n = w.out_features(), k = w.in_features();
  const GemmKernels& kernels = GemmKernelsFor(ctx.isa);
  const Grid g = MakeGrid(a.num_rows, n, k, kPanelColumns, kOneDnnRowsMax, NumThreads(ctx));
  ParallelTasks(ctx, g.row_tasks * g.column_tasks, [&](int64_t task) {
    const int64_t row = task / g.column_tasks * g.rows, begin = task % g.column_tasks * g.columns;
    const int64_t num_rows = std::min(g.rows, a.num_rows - row), end = std::min(n, begin + g.columns);
    for (int64_t column = begin; column < end; column += kPanelColumns) {
      kernels.multiply_panel(a.x + row * k, num_rows, k, w.panel(column / kPanelColumns),
                             a.bias == nullptr ? nullptr : a.bias + column, std::min(kPanelColumns, end - column),
                             a.y + row * n + column, n);
    }
  });
  return absl::OkStatus();
}

}  // namespace

PanelWeight::PanelWeight(const WeightView& w)
    : LinearWeight(w.out_features, w.in_features),
      panels_(static_cast<size_t>(CeilDiv(w.out_features, kPanelColumns) * w.in_features * kPanelColumns)) {
  std::vector<float> row(static_cast<size_t>(w.in_features));
  for (int64_t n = 0; n < w.out_features; ++n) {
    WidenWeight(w, n * w.in_features, w.in_features, row.data());
    float* to = panels_.data() + n / kPanelColumns * w.in_features * kPanelColumns + n % kPanelColumns;
    for (int64_t k = 0; k < w.in_features; ++k) to[k * kPanelColumns] = row[static_cast<size_t>(k)];
  }
}

absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(const WeightView& w, GemmCompute compute) {
  if (absl::Status s = ValidateWeight(w); !s.ok()) return s;
  if (compute == GemmCompute::kBF16 && !CpuHasBf16Gemm()) {
    return absl::UnimplementedError("PackLinear: this machine has no product of bf16 (AVX512-BF16, AMX)");
  }
  if (w.dtype == DType::kE4M3) {
    return Fp8Weight::Pack(w, compute == GemmCompute::kBF16 || (compute == GemmCompute::kAuto && CpuHasBf16Gemm()));
  }
  if (w.dtype == DType::kInt4) {
    return Int4Weight::Pack(w, compute == GemmCompute::kBF16 || (compute == GemmCompute::kAuto && CpuHasBf16Gemm()));
  }
  if (compute == GemmCompute::kBF16 || (compute == GemmCompute::kAuto && w.dtype == DType::kBF16 && CpuHasBf16Gemm())) {
    return Bf16Weight::Pack(w);
  }
  if (DetectCpuIsa() >= CpuIsa::kAvx512) {
    absl::StatusOr<std::unique_ptr<OneDnnMatrix>> matrix = OneDnnMatrix::Pack(w);
    if (matrix.ok()) {
      return std::unique_ptr<LinearWeight>(std::make_unique<OneDnnWeight>(w, std::move(matrix).value()));
    }
    if (matrix.status().code() != absl::StatusCode::kUnimplemented) return matrix.status();
  }
  return std::unique_ptr<LinearWeight>(std::make_unique<PanelWeight>(w));
}

// Codes are exact in f32 and in bf16; a row's scale comes behind the product. Scales of groups come in front.
static absl::Status MultiplyE4M3(const KernelContext& ctx, const LinearArgs& a) {
  const int64_t n = a.weight->out_features(), k = a.weight->in_features(), group = a.x.scale_group;
  const auto* const codes = static_cast<const uint8_t*>(a.x.data);
  std::vector<float> values(static_cast<size_t>(a.num_rows * k));
  for (int64_t i = 0; i < a.num_rows; ++i) {
    for (int64_t j = 0; j < k; ++j)
      values[i * k + j] =
          kE4M3Values[codes[i * k + j]] * (group == 0 ? 1 : a.x.scales[j / group * E4M3Rows(a.num_rows) + i]);
  }
  LinearArgs plain = a;
  plain.x = values.data();
  if (group != 0) return Linear(ctx, plain);
  plain.bias = nullptr;
  if (absl::Status s = Linear(ctx, plain); !s.ok()) return s;
  for (int64_t i = 0; i < a.num_rows; ++i) {
    for (int64_t j = 0; j < n; ++j)
      a.y[i * n + j] = a.y[i * n + j] * a.x.scales[i] + (a.bias == nullptr ? 0 : a.bias[j]);
  }
  return absl::OkStatus();
}

absl::Status Linear(const KernelContext& ctx, const LinearArgs& a) {
  if (absl::Status s = ValidateLinear(a); !s.ok()) return s;
  if (a.num_rows == 0) return absl::OkStatus();
  if (a.x.dtype == DType::kE4M3) return MultiplyE4M3(ctx, a);
  if (const auto* w = dynamic_cast<const Bf16Weight*>(a.weight)) return RunBf16(ctx, a, *w);
  if (const auto* w = dynamic_cast<const Fp8Weight*>(a.weight)) return RunFp8(ctx, a, *w);
  if (const auto* w = dynamic_cast<const Int4Weight*>(a.weight)) return RunInt4(ctx, a, *w);
  if (const auto* w = dynamic_cast<const OneDnnWeight*>(a.weight)) return RunOneDnn(ctx, a, *w);
  if (const auto* w = dynamic_cast<const PanelWeight*>(a.weight)) return RunPanels(ctx, a, *w);
  return InvalidCall("Linear: the weight was packed by another backend");
}

}  // namespace spl::kernels::cpu
