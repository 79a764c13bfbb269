// Products with int4 weights on the CPU.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/gemm/gemm_int4_isa.h"
#include "kernels/gemm/gemm_scaled_cpu.h"

namespace spl::kernels::cpu {

// Packed codes (gemm_int4_isa.h), half a byte an element, with offsets if the zero points are not all 8.
class Int4Weight final : public ScaledWeight {
 public:
  // `round_x`: rows of x are rounded to bf16, as they are for bf16 weights. ResourceExhausted: no memory.
  static absl::StatusOr<std::unique_ptr<LinearWeight>> Pack(const WeightView& view, bool round_x);

  // [32], of one panel's columns.
  const uint8_t* offsets(int64_t panel, int64_t group) const {
    return offsets_.data() + (symmetric_ ? 0 : (panel * num_groups() + group) * kBf16PanelColumns);
  }
  // [in_features]: WeightView::column_order; empty: as they stand.
  const std::vector<int32_t>& column_order() const { return column_order_; }

 private:
  Int4Weight(const WeightView& view, bool round_x);
  void Fill(const WeightView& view);

  const bool symmetric_;
  std::vector<uint8_t> offsets_;
  std::vector<int32_t> column_order_;
};

// Linear with an Int4Weight. The order of a row's sums does not depend on the number of rows or threads. A weight with
// a column order copies x once. Unimplemented: the weight rounds x, and ctx.isa has no bf16 product.
absl::Status RunInt4(const KernelContext& ctx, const LinearArgs& args, const Int4Weight& weight);

}  // namespace spl::kernels::cpu
