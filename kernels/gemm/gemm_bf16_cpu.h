// bf16 products on the CPU: how a product is cut into tasks, and the packed weight that they read.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/buffer.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_bf16_isa.h"

namespace spl::kernels::cpu {

// Panels of 32 columns (gemm_bf16_isa.h), bf16: [ceil(out_features / 32), ceil(in_features / 32), 2, 16, 16, 2].
// f32 and f16 weights are rounded.
class Bf16Weight final : public LinearWeight {
 public:
  // ResourceExhausted: no memory.
  static absl::StatusOr<std::unique_ptr<LinearWeight>> Pack(const WeightView& view);

  const bf16* panel(int64_t index) const { return static_cast<const bf16*>(data_->data()) + index * panel_elements(); }
  int64_t num_panels() const { return (out_features() + kBf16PanelColumns - 1) / kBf16PanelColumns; }
  int64_t depth_blocks() const { return (in_features() + kBf16DepthBlock - 1) / kBf16DepthBlock; }
  int64_t panel_elements() const { return depth_blocks() * kBf16PairElements; }

 private:
  explicit Bf16Weight(const WeightView& w) : LinearWeight(w.out_features, w.in_features) {}
  void Fill(const WeightView& view);

  std::unique_ptr<Buffer> data_;
};

// Linear with a Bf16Weight. The order of a row's sums does not depend on the number of rows or threads. Unimplemented:
// ctx.isa has no bf16 product.
absl::Status RunBf16(const KernelContext& ctx, const LinearArgs& args, const Bf16Weight& weight);

}  // namespace spl::kernels::cpu
