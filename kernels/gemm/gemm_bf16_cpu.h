// bf16 products on the CPU: how a product is cut into tasks, and the packed weight that they read.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/buffer.h"
#include "kernels/common/cpu_features.h"
#include "kernels/common/scratch.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_bf16_isa.h"

namespace spl::kernels::cpu {

// A group of panels over this much of the weight stays in the second-level cache (1 to 2 MiB a core since Ice Lake)
// while all rows pass it, so that the weight itself is read from memory once.
inline constexpr int64_t kBf16GroupBytes = 1 << 20;
// Depth blocks of a multiply: 32 rows of x over 512 depths are 32 KiB, which a first-level cache of 48 KiB keeps for
// the next panel of the group, since the weight's tiles pass it by (TILELOADDT1). Fewer: loading and storing the sums
// shows. One core of a Granite Rapids, 512 rows, TFLOP/s: 8 1.90, 12 2.17, 16 2.18, 32 1.58, 64 1.79; without that hint
// 16 is 1.43.
inline constexpr int64_t kBf16InnerBlocks = 16;
// Depth blocks that a group covers: with 2,048 depths a panel is 128 KiB and eight of them are a group.
inline constexpr int64_t kBf16OuterBlocks = 64;
inline constexpr int64_t kBf16GroupPanels =
    kBf16GroupBytes / (kBf16OuterBlocks * kBf16PairElements * int64_t{sizeof(bf16)});

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

// The leaf code for ctx.isa; null: it has no bf16 product.
const Bf16GemmKernels* Bf16GemmKernelsFor(CpuIsa isa);

// How a product is cut into tasks.
struct PanelCut {
  int64_t rows = 0;  // rows of one task: a multiple of 32, or all
  int64_t panels = 0;
};
PanelCut CutPanels(int64_t num_rows, int64_t num_panels, int64_t panel_bytes, int64_t threads);

// Packed rows of args.x (gemm_bf16_isa.h), all row blocks behind each other. They lie in `scratch`.
const bf16* PackBf16Rows(const KernelContext& ctx, const LinearArgs& args, const Bf16GemmKernels& kernels,
                         Scratch& scratch);

// Linear with a Bf16Weight. The order of a row's sums does not depend on the number of rows or threads. Unimplemented:
// ctx.isa has no bf16 product.
absl::Status RunBf16(const KernelContext& ctx, const LinearArgs& args, const Bf16Weight& weight);

}  // namespace spl::kernels::cpu
