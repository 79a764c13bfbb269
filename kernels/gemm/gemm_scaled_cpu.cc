#include "kernels/gemm/gemm_scaled_cpu.h"

#include <utility>

#include "kernels/common/host_buffer.h"

namespace spl::kernels::cpu {

ScaledWeight::ScaledWeight(const WeightView& view, bool round_x, int64_t block_bytes)
    : LinearWeight(view.out_features, view.in_features),
      round_x_(round_x),
      block_bytes_(block_bytes),
      num_groups_(view.num_scale_groups()),
      group_blocks_(view.scale_group == 0 ? depth_blocks() : view.scale_group / kBf16DepthBlock) {
  static_assert(kScaleGroupStep == kBf16DepthBlock);
}

absl::Status ScaledWeight::Allocate(const WeightView& view) {
  absl::StatusOr<std::unique_ptr<Buffer>> codes = AllocateHostBuffer(static_cast<size_t>(num_panels() * panel_bytes()));
  if (!codes.ok()) return codes.status();
  codes_ = std::move(codes).value();
  absl::StatusOr<std::unique_ptr<Buffer>> memory =
      AllocateHostBuffer(static_cast<size_t>(num_panels() * num_groups_ * kBf16PanelColumns) * sizeof(float));
  if (!memory.ok()) return memory.status();
  scales_ = std::move(memory).value();
  auto* scales = static_cast<float*>(scales_->data());
  for (int64_t n = 0; n < out_features(); ++n) {
    float* to = scales + n / kBf16PanelColumns * num_groups_ * kBf16PanelColumns + n % kBf16PanelColumns;
    for (int64_t g = 0; g < num_groups_; ++g) to[g * kBf16PanelColumns] = view.scales[n * num_groups_ + g];
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
