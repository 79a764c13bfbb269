// Mixture of experts, second half: one product per expert over the rows that routing.h sorted to it, and the weighted
// sum of the experts' results per row.
//
// Determinism  a place's result depends only on its own row and its expert's weight, and a row's sum is taken in the
//              order of its slots. Both are bitwise the same whatever other rows share the call, however many each
//              expert has, and whatever the number of threads.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/common/activations.h"
#include "kernels/common/dtype.h"
#include "kernels/common/kernel_context.h"
#include "kernels/gemm/gemm.h"

namespace spl::kernels {

// The weights of all experts, of one shape. Borrowed.
struct GroupedWeightView {
  const void* data = nullptr;  // [num_experts, out_features, in_features], contiguous; no alignment is assumed
  DType dtype = DType::kF32;
  int32_t num_experts = 0;
  int64_t out_features = 0;
  int64_t in_features = 0;
  const float* scales = nullptr;  // kE4M3, kInt4: [num_experts, out_features, groups], as WeightView's
  int64_t scale_group = 0;
  const uint8_t* zeros = nullptr;  // kInt4: [num_experts, out_features, groups], as WeightView's; or null

  // The weight of one expert.
  WeightView expert(int32_t e) const {
    const int64_t bytes = out_features * DTypeRowBytes(dtype, in_features);
    WeightView view{static_cast<const unsigned char*>(data) + e * bytes,
                    dtype,
                    out_features,
                    in_features,
                    scales,
                    scale_group,
                    zeros};
    if (scales != nullptr) view.scales += e * out_features * view.num_scale_groups();
    if (zeros != nullptr) view.zeros += e * out_features * view.num_scale_groups();
    return view;
  }
};

// Packed weights. As LinearWeight (gemm.h): made by a backend, used only with it, immutable.
class GroupedWeight {
 public:
  virtual ~GroupedWeight() = default;
  int32_t num_experts() const { return num_experts_; }
  int64_t out_features() const { return out_features_; }
  int64_t in_features() const { return in_features_; }

 protected:
  explicit GroupedWeight(const GroupedWeightView& w)
      : num_experts_(w.num_experts), out_features_(w.out_features), in_features_(w.in_features) {}

 private:
  int32_t num_experts_;
  int64_t out_features_, in_features_;
};

// y[p] = x[rows[p]] · W[e]ᵀ for the places p in [offsets[e], offsets[e + 1]) of every expert e. offsets and rows are
// results of RouteExperts; they lie in device memory, and only the host variants check them.
// Cost  reads the weights of experts that have rows, once each; allocates nothing in the steady state.
struct GroupedLinearArgs {
  ConstActivations x;  // [num_x_rows, in_features]; not y
  int64_t num_x_rows = 0;
  const int32_t* rows = nullptr;     // [num_places], or null: place p reads row p (num_x_rows = num_places)
  const int32_t* offsets = nullptr;  // [num_experts + 1], from 0 to num_places
  const GroupedWeight* weight = nullptr;
  Activations y;           // [num_places, out_features]
  int64_t num_places = 0;  // 0 is a no-op
};

// out[i] = Σ_k weights[i, k] · y[places[i, k]], slot by slot from k = 0, in f32.
struct CombineExpertsArgs {
  ConstActivations y;               // [num_rows * top_k, width], by place; not out
  const int32_t* places = nullptr;  // [num_rows, top_k], a permutation of [0, num_rows * top_k)
  const float* weights = nullptr;   // [num_rows, top_k]
  Activations out;                  // [num_rows, width]
  int64_t num_rows = 0;
  int32_t top_k = 0;
  int64_t width = 0;
};

// InvalidArgument: shapes, null tensors, a weight of another backend.
absl::Status ValidateGroupedWeight(const GroupedWeightView& weight);
absl::Status ValidateGroupedLinear(const GroupedLinearArgs& args);
absl::Status ValidateCombineExperts(const CombineExpertsArgs& args);

namespace ref {
absl::StatusOr<std::unique_ptr<GroupedWeight>> PackGrouped(const GroupedWeightView& weight);
absl::Status GroupedLinear(const KernelContext& ctx, const GroupedLinearArgs& args);
absl::Status CombineExperts(const KernelContext& ctx, const CombineExpertsArgs& args);
}  // namespace ref

namespace cpu {  // one GEMM (gemm.h) per expert
absl::StatusOr<std::unique_ptr<GroupedWeight>> PackGrouped(const GroupedWeightView& weight, GemmCompute compute);
absl::Status GroupedLinear(const KernelContext& ctx, const GroupedLinearArgs& args);
absl::Status CombineExperts(const KernelContext& ctx, const CombineExpertsArgs& args);
}  // namespace cpu

}  // namespace spl::kernels
