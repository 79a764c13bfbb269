// The staged batch with pages of bf16, for operations that do not read pages of kE4M3 themselves.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/backend/cuda/cuda_session.h"

namespace spl::kernels::cuda {

// `batch` itself unless its pool is kE4M3. Then the pages that the rows of `sequences` see under `rules`, and those of
// positions below `min_positions`, are widened into memory of the session, which the next call takes again. sequences:
// those of `batch`, in order.
absl::StatusOr<PagedBatch> InBf16(CudaSession& session, const PagedBatch& batch, int32_t num_kv_heads,
                                  const HeadRules& rules, std::span<const PrefillSequence> sequences,
                                  int32_t min_positions = 0);

}  // namespace spl::kernels::cuda
