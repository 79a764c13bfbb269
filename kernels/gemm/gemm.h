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

// A scale group of an FP8 or int4 weight, unless it is a whole row, is a multiple of this many columns: a depth block
// of the CPU variants (gemm_bf16_isa.h).
inline constexpr int64_t kScaleGroupStep = 32;

// A weight as it stands in a checkpoint. Borrowed.
//
// kE4M3: element (n, k) is scales[n][k / scale_group] times the value of its code. This one form holds the published
// ones: a scale per tensor and per output channel is a group of a whole row, 128 x 128 blocks are groups of 128 columns
// whose scale is repeated for the block's rows.
//
// kInt4: codes are 0 to 15, two a byte: the low four bits are the even column, and in_features is even. Element (n, k)
// is scales[n][g] times (code - zeros[n][g]), g = k / scale_group. The difference, a whole number in [-16, 15], is
// exact in bf16 and e4m3. Element k of a row belongs to column column_order[k] of x.
struct WeightView {
  const void* data = nullptr;  // [out_features, in_features], row-major; no alignment is assumed
  DType dtype = DType::kF32;
  int64_t out_features = 0;
  int64_t in_features = 0;
  const float* scales = nullptr;   // [out_features, num_scale_groups()], in host memory; null unless kE4M3, kInt4
  int64_t scale_group = 0;         // columns that share a scale, a multiple of kScaleGroupStep; 0: a whole row
  const uint8_t* zeros = nullptr;  // kInt4: [out_features, num_scale_groups()], 0 to 16, in host memory; null: all 8
  const int32_t* column_order = nullptr;  // kInt4: [in_features], a permutation, in host memory; null: column k is k

  int64_t num_scale_groups() const { return scale_group == 0 ? 1 : (in_features + scale_group - 1) / scale_group; }
};

// A packed weight; made by a backend, used only with that backend. Immutable: many threads may use one at once, each
// with its own context.
class LinearWeight {
 public:
  virtual ~LinearWeight() = default;
  int64_t out_features() const { return out_features_; }
  int64_t in_features() const { return in_features_; }
  // Whether a product of num_rows rows takes less time with x in e4m3. The host's do not.
  virtual bool PrefersE4M3(int64_t /*num_rows*/) const { return false; }
  virtual int64_t e4m3_group() const { return 0; }  // the scale_group of such an x
  // Whether LinearAdd of num_rows rows takes less time than Linear and an addition in the norm behind it.
  virtual bool PrefersAdd(int64_t /*num_rows*/) const { return false; }

 protected:
  LinearWeight(int64_t out_features, int64_t in_features) : out_features_(out_features), in_features_(in_features) {}

 private:
  int64_t out_features_, in_features_;
};

struct LinearArgs {
  // [num_rows, in_features], contiguous. kE4M3 only on the host, or with an FP8 weight that prefers it; with scale
  // groups x and y have room for E4M3Rows(num_rows) rows, and what the surplus ones of y have then is undefined.
  ConstActivations x;
  const LinearWeight* weight = nullptr;
  const float* bias = nullptr;  // [out_features] or null
  Activations y;                // [num_rows, out_features], contiguous; not x
  int64_t num_rows = 0;         // 0 is a no-op
};

// Arithmetic of the CPU variant. A row's result is always bitwise independent of num_rows and the number of threads.
//   kF32   weights are widened at load; products and sums in f32
//   kBF16  x is rounded to bf16 (AMX or AVX512-BF16); sums in f32, in the instruction's order (gemm_bf16_isa.h)
// x in e4m3 is multiplied as the values of its codes; then y is multiplied by the scale of x's row, and the bias added.
// With scale groups it is multiplied as scales times codes.
// FP8 and int4 weights keep their codes: x is rounded to bf16 or not, as above, the sum of a scale group has exact
// products, and is multiplied by the group's scale (gemm_fp8_isa.h). No weight is rounded. kAuto treats them as bf16
// weights.
enum class GemmCompute : uint8_t { kAuto, kF32, kBF16 };

namespace ref {
absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(const WeightView& weight);
absl::Status Linear(const KernelContext& ctx, const LinearArgs& args);
}  // namespace ref

namespace cpu {  // bf16, FP8 and int4: our own; f32: oneDNN on AVX-512, our own elsewhere
absl::StatusOr<std::unique_ptr<LinearWeight>> PackLinear(const WeightView& weight, GemmCompute compute);
absl::Status Linear(const KernelContext& ctx, const LinearArgs& args);
}  // namespace cpu

}  // namespace spl::kernels
