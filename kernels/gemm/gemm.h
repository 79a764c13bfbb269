// y = x · Wᵀ (+ bias) with a weight packed once at load.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/activations.h"
#include "kernels/common/dtype.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

// A weight as it stands in a checkpoint. Borrowed.
struct WeightView {
  const void* data = nullptr;  // [out_features, in_features], row-major; no alignment is assumed
  DType dtype = DType::kF32;
  int64_t out_features = 0;
  int64_t in_features = 0;
};

// A packed weight; made by a backend, used only with that backend. Immutable: many threads may use one at once, each
// with its own context.
class LinearWeight {
 public:
  virtual ~LinearWeight() = default;
  int64_t out_features() const { return out_features_; }
  int64_t in_features() const { return in_features_; }

 protected:
  LinearWeight(int64_t out_features, int64_t in_features) : out_features_(out_features), in_features_(in_features) {}

 private:
  int64_t out_features_, in_features_;
};

struct LinearArgs {
  ConstActivations x;  // [num_rows, in_features], contiguous
  const LinearWeight* weight = nullptr;
  const float* bias = nullptr;  // [out_features] or null
  Activations y;                // [num_rows, out_features], contiguous; not x
  int64_t num_rows = 0;         // 0 is a no-op
};

// Arithmetic of the CPU variant. A row's result is always bitwise independent of num_rows and the number of threads.
//   kF32   weights are widened at load; products and sums in f32
//   kBF16  x is rounded to bf16 (AMX or AVX512-BF16); sums in f32, in the instruction's order (gemm_bf16_isa.h)
enum class GemmCompute : uint8_t { kAuto, kF32, kBF16 };

namespace ref {
absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(const WeightView& weight);
absl::Status Linear(const KernelContext& ctx, const LinearArgs& args);
}  // namespace ref

namespace cpu {  // bf16: our own; f32: oneDNN on AVX-512, our own elsewhere
absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(const WeightView& weight, GemmCompute compute);
absl::Status Linear(const KernelContext& ctx, const LinearArgs& args);
}  // namespace cpu

}  // namespace spl::kernels
