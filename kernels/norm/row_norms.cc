#include "kernels/norm/row_norms.h"

#include <cmath>

#include "kernels/common/parallel.h"
#include "kernels/common/status.h"

namespace spl::kernels {

absl::Status ValidateRowNorms(const RowNormsArgs& a) {
  if (a.num_rows < 0 || a.width <= 0 || a.width % 4 != 0)
    return InvalidCall("RowNorms: ", a.num_rows, " rows of ", a.width);
  if (a.num_rows > 0 && (a.x.data == nullptr || a.out == nullptr)) return InvalidCall("RowNorms: null tensor");
  return absl::OkStatus();
}

absl::Status ref::RowNorms(const KernelContext&, const RowNormsArgs& a) {
  if (absl::Status s = ValidateRowNorms(a); !s.ok()) return s;
  const float* x = a.x;
  for (int64_t i = 0; i < a.num_rows; ++i) {
    double sum = 0;
    for (int64_t c = 0; c < a.width; ++c) sum += double{x[i * a.width + c]} * x[i * a.width + c];
    a.out[i] = static_cast<float>(std::sqrt(sum));
  }
  return absl::OkStatus();
}

// Sixteen chains, which the compiler turns into vectors; the widths of models are multiples of that.
absl::Status cpu::RowNorms(const KernelContext& ctx, const RowNormsArgs& a) {
  if (absl::Status s = ValidateRowNorms(a); !s.ok()) return s;
  constexpr int kChains = 16;
  const float* x = a.x;
  ParallelRows(ctx, a.num_rows, (int64_t{64} << 10) / a.width, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* row = x + i * a.width;
      float sums[kChains] = {};
      int64_t c = 0;
      for (; c + kChains <= a.width; c += kChains) {
        for (int k = 0; k < kChains; ++k) sums[k] += row[c + k] * row[c + k];
      }
      float sum = 0;
      for (; c < a.width; ++c) sum += row[c] * row[c];
      for (const float chain : sums) sum += chain;
      a.out[i] = std::sqrt(sum);
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels
