// Products with FP8 weights on the CPU: the packed weight, and how a product is cut into tasks.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/buffer.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_bf16_isa.h"

namespace spl::kernels::cpu {

// Packed codes (gemm_fp8_isa.h), one byte an element, and the scales of each panel's columns. The form is the same for
// every instruction set.
class Fp8Weight final : public LinearWeight {
 public:
  // `round_x`: rows of x are rounded to bf16, as they are for bf16 weights. ResourceExhausted: no memory.
  static absl::StatusOr<std::unique_ptr<LinearWeight>> Pack(const WeightView& view, bool round_x);

  bool round_x() const { return round_x_; }
  int64_t num_panels() const { return (out_features() + kBf16PanelColumns - 1) / kBf16PanelColumns; }
  int64_t depth_blocks() const { return (in_features() + kBf16DepthBlock - 1) / kBf16DepthBlock; }
  int64_t panel_bytes() const { return depth_blocks() * kBf16PairElements; }
  int64_t num_groups() const { return num_groups_; }
  int64_t group_blocks() const { return group_blocks_; }  // depth blocks of a scale group; the last one may be short
  const uint8_t* panel(int64_t index) const {
    return static_cast<const uint8_t*>(codes_->data()) + index * panel_bytes();
  }
  // [32], of one panel's columns.
  const float* scales(int64_t panel, int64_t group) const {
    return static_cast<const float*>(scales_->data()) + (panel * num_groups_ + group) * kBf16PanelColumns;
  }

 private:
  Fp8Weight(const WeightView& view, bool round_x);
  void Fill(const WeightView& view);

  const bool round_x_;
  const int64_t num_groups_, group_blocks_;
  std::unique_ptr<Buffer> codes_, scales_;
};

// Linear with an Fp8Weight. The order of a row's sums does not depend on the number of rows or threads. Unimplemented:
// the weight rounds x, and ctx.isa has no bf16 product.
absl::Status RunFp8(const KernelContext& ctx, const LinearArgs& args, const Fp8Weight& weight);

}  // namespace spl::kernels::cpu
