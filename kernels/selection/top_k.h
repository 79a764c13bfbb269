// The k largest of n scores (docs/methods/sparsex.md, kernel K3).
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"

namespace spl::kernels {

// out = the indices of the k largest scores, ascending; of equal scores the lower index is taken. NaN counts as the
// lowest. REQUIRES 0 <= k <= num_scores.
struct TopKArgs {
  const float* scores = nullptr;  // [num_scores]
  int64_t num_scores = 0;         // at most 2^20
  int64_t k = 0;
  int32_t* out = nullptr;  // [k]
};

inline constexpr int64_t kTopKScoresMax = 1 << 20;

absl::Status ValidateTopK(const TopKArgs& args);

namespace ref {
absl::Status TopK(const KernelContext& ctx, const TopKArgs& args);
}
namespace cpu {
absl::Status TopK(const KernelContext& ctx, const TopKArgs& args);
}

}  // namespace spl::kernels
