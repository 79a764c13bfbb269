// Selects the tokens with the largest given scores, for each head stream of a decode batch: the last step of a selector
// whose scores come from elsewhere (Quest's page bounds, LoopServe's column sums; docs/methods/loopserve.md and
// docs/methods/baselines.md).
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"
#include "kernels/common/kv_pool.h"
#include "kernels/common/token_selection.h"

namespace spl::kernels {

// Runs for each stream of a sequence whose step selects in this layer. Score i stands for a granule: positions
// [granularity i, granularity (i + 1)), the last one cut off at kv_len. Takes whole granules, at most budget /
// granularity of them: those that hold one of the last `recent` positions (the last of these, if they are too many),
// then those with the largest scores; ties go to the lower one, NaN is lowest. The list has their positions, or all
// positions if kv_len <= budget. For a listed stream, candidates replace positions and their number replaces kv_len,
// until the list is written.
struct TopTokensArgs {
  const float* scores = nullptr;  // device [num_sequences * num_kv_heads, scores_stride]
  int64_t scores_stride = 0;      // elements; at least ceil(kv_len / granularity)
  int32_t granularity = 1;        // 1 or 16; every budget is a multiple of it
  int32_t num_kv_heads = 0;
  KvPoolView pool;  // pool with the listed positions (candidates.h); may be empty if no sequence is listed
  // Host backends read kv_len, step, budget, recent and the listed positions of these. A device reads the staged batch,
  // and checks these if they are given.
  std::span<const SelectingSequence> sequences;
  TokenLists lists;   // out; lists of streams that do not select stay unchanged
  int32_t layer = 0;  // layer number in the staged batch
  int32_t plan = 0;   // as in SelectTokensArgs
};

// InvalidArgument: a granularity other than 1 and 16, a budget or recent out of range, a stride that is too short.
absl::Status ValidateTopTokens(const TopTokensArgs& args);

namespace ref {
absl::Status TopTokens(const KernelContext& ctx, const TopTokensArgs& args);
}
namespace cpu {
absl::Status TopTokens(const KernelContext& ctx, const TopTokensArgs& args);
}

}  // namespace spl::kernels
