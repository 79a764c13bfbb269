#include "services/engine/runtime/prompt_logprobs.h"

#include <algorithm>

#include "services/base/status.h"

namespace spl::engine {
namespace {

// Makes a token the most likely one. Log-probabilities are those before the edit.
constexpr float kCertain = 1e30f;

}  // namespace

absl::Status PromptLogprobs::Add(ParallelExecutor& executor, std::span<const int32_t> tokens, const PrefillSlice& slice,
                                 int32_t first_row, int32_t num_top, std::span<TokenLogprob> out) {
  // The last position's logits give the first token of the answer.
  size_t num_rows = slice.positions.size();
  if (num_rows > 0 && static_cast<size_t>(slice.positions.back()) + 1 == tokens.size()) --num_rows;
  for (size_t begin = 0; begin < num_rows; begin += kRowsAtOnce) {
    const std::span<const int32_t> positions = slice.positions.subspan(begin, std::min(kRowsAtOnce, num_rows - begin));
    logit_rows_.clear();
    edits_.clear();
    rows_.clear();
    for (size_t i = 0; i < positions.size(); ++i) {
      logit_rows_.push_back(first_row + static_cast<int32_t>(begin + i));
      edits_.push_back({.token = tokens[positions[i] + 1], .bias = kCertain});
    }
    for (size_t i = 0; i < positions.size(); ++i) {
      rows_.push_back({.logits_row = static_cast<int32_t>(i), .num_top = num_top});
      rows_.back().edits = std::span(edits_).subspan(i, 1);
    }
    SPLICE_RETURN_IF_ERROR(executor.ComputeLogits(logit_rows_));
    SPLICE_ASSIGN_OR_RETURN(const SampledBatch batch, executor.Sample(rows_));
    for (size_t i = 0; i < positions.size(); ++i) {
      const kernels::SampledRow& row = batch.rows[i];
      TokenLogprob& logprob = out[positions[i]];
      logprob.logprob = kernels::LogprobOf(row.logit, row);
      logprob.top.clear();
      for (const kernels::TopToken& top : batch.top_of(i).first(num_top)) {
        if (top.token >= 0) logprob.top.emplace_back(top.token, kernels::LogprobOf(top.logit, row));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::engine
