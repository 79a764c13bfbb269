// The tokens of the largest given scores, for each head stream of a decode batch: the last step of a selector whose
// scores come from elsewhere (Quest's page bounds, LoopServe's column sums; docs/methods/loopserve.md and
// docs/methods/baselines.md).
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/common/kernel_context.h"
#include "kernels/common/kv_pool.h"
#include "kernels/common/token_selection.h"

namespace spl::kernels {

// For each stream of a sequence whose step selects in this layer: score i stands for the positions
// [granularity i, granularity (i + 1)), a granule, the last one cut off at kv_len. Whole granules are taken, at most
// budget / granularity of them: those that hold one of the last `recent` positions (the last ones, if these are too
// many), then those of the largest scores, ties to the lower one, NaN lowest. The list has their positions; all
// positions when kv_len <= budget. Of a stream that is listed, candidates take the places of positions, their number
// that of kv_len, until the list is written.
struct TopTokensArgs {
  const float* scores = nullptr;  // device [num_sequences * num_kv_heads, scores_stride]
  int64_t scores_stride = 0;      // elements; at least ceil(kv_len / granularity)
  int32_t granularity = 1;        // 1 or 16; every budget is a multiple of it
  int32_t num_kv_heads = 0;
  KvPoolView pool;  // with the positions of what is listed (candidates.h); may be empty where no sequence is
  // The host backends read kv_len, step, budget, recent and what is listed of these; a device reads the staged batch,
  // and checks these where they are given.
  std::span<const SelectingSequence> sequences;
  TokenLists lists;   // out; lists of streams that do not select stay as they are
  int32_t layer = 0;  // of the staged batch
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
