// Mixture of experts, first half: the experts and weights of each row, and the rows sorted by expert.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

inline constexpr int32_t kMoeExpertsMax = 1024;
inline constexpr int32_t kMoeTopKMax = 64;

// p = softmax(logits[i]) over all experts, in f32. The row goes to its top_k experts by logit, best first; equal logits
// go to the lower index, and a NaN loses to every number. An expert's weight is p_e; with `renormalize` it is p_e / Σ p
// over the chosen ones. (Qwen3-MoE; Shazeer et al., "Outrageously Large Neural Networks", 2017.)
//
// Every (row, slot) pair gets a place in an order by expert, then row; the grouped feed-forward (grouped_linear.h)
// computes place by place. There are num_rows * top_k places and no capacity limit: no pair is ever dropped.
//
// Determinism  ids and weights of a row depend on its own logits only, bitwise. The places depend on all rows.
// Numerics     weights within Tolerance(f32) of the reference; ids equal wherever logits differ.
struct RouteExpertsArgs {
  const float* logits = nullptr;  // [num_rows, num_experts]
  int64_t num_rows = 0;           // 0: only offsets are written, all 0
  int32_t num_experts = 0;        // [1, kMoeExpertsMax]
  int32_t top_k = 0;              // [1, min(num_experts, kMoeTopKMax)]
  bool renormalize = false;
  int32_t* expert_ids = nullptr;  // [num_rows, top_k]
  float* weights = nullptr;       // [num_rows, top_k]
  int32_t* offsets = nullptr;     // [num_experts + 1]: places [offsets[e], offsets[e + 1]) belong to expert e
  int32_t* rows = nullptr;        // [num_rows * top_k]: the row that each place stands for
  int32_t* places = nullptr;      // [num_rows, top_k]: the place of each pair
};

// InvalidArgument: counts out of range, a null tensor, more than 2^31 - 1 pairs.
absl::Status ValidateRouteExperts(const RouteExpertsArgs& args);

namespace ref {
absl::Status RouteExperts(const KernelContext& ctx, const RouteExpertsArgs& args);
}
namespace cpu {
absl::Status RouteExperts(const KernelContext& ctx, const RouteExpertsArgs& args);
}

}  // namespace spl::kernels
