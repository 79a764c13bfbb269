// Raises each score to the best of its neighbours before the best are chosen: a token that a question points at stands
// in a phrase, and the whole phrase is wanted. (SnapKV pools its scores this way, section 4.2 there; SparseX does not.)
//
//   out_i = max { in_j : |i - j| <= radius, 0 <= j < num_scores }
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

inline constexpr int32_t kPoolRadiusMax = 64;

struct PoolScoresArgs {
  const float* scores = nullptr;  // [num_scores], no NaN
  int64_t num_scores = 0;         // at most kTopKScoresMax
  int32_t radius = 0;             // [0, kPoolRadiusMax]; 0: a copy
  float* out = nullptr;           // [num_scores], not `scores`
};

// InvalidArgument: a number out of range, a null pointer, out == scores.
absl::Status ValidatePoolScores(const PoolScoresArgs& args);

// Cost: num_scores · (2 radius + 1) comparisons; exact, so every variant gives the same bits.
namespace ref {
absl::Status PoolScores(const KernelContext& ctx, const PoolScoresArgs& args);
}
namespace cpu {
absl::Status PoolScores(const KernelContext& ctx, const PoolScoresArgs& args);
}

}  // namespace spl::kernels
