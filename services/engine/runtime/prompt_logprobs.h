// Log-probabilities of a prompt's own tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/runtime/sampler.h"

namespace spl::engine {

// Most log-probabilities of one prompt, those of alternatives included: about 16 MiB.
inline constexpr int64_t kMaxPromptLogprobs = 1 << 20;

// One thread at a time.
class PromptLogprobs {
 public:
  // Writes out[p] for every position p of the slice but the prompt's last: the log-probability of tokens[p + 1] behind
  // tokens[0, p], from the model's own logits at temperature 1, and the `num_top` most likely tokens there. The
  // executor has just run the slice, whose rows begin at `first_row`. `out`: [tokens.size() - 1], of a whole prompt.
  //
  // Cost: a product with the language model head for each row, kRowsAtOnce rows at a time, so that memory is bounded.
  // Replaces the executor's logits. A row's result does not depend on the rows beside it.
  absl::Status Add(ParallelExecutor& executor, std::span<const int32_t> tokens, const PrefillSlice& slice,
                   int32_t first_row, int32_t num_top, std::span<TokenLogprob> out);

 private:
  static constexpr size_t kRowsAtOnce = 32;  // 16 MiB of logits with 128K tokens

  std::vector<int32_t> logit_rows_;
  std::vector<kernels::TokenEdit> edits_;
  std::vector<kernels::SampleRow> rows_;
};

}  // namespace spl::engine
