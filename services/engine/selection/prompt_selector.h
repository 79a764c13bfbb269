// Base of the selectors that choose once, before the first step (SnapKV, AdaKV, H2O; docs/methods/baselines.md). Each
// head keeps the positions of the prompt that some of its rows attend to most; generated tokens are added. These rows
// run once more to measure their attention (runtime/prompt_replay.h). All KV stays in memory; steps only read less of
// it.
#pragma once

#include <span>
#include <vector>

#include "services/engine/selection/choosing_selector.h"

namespace spl::engine {

class PromptSelector : public ChoosingSelector {
 public:
  // REQUIRES: options.window < options.budget.
  PromptSelector(const ModelConfig& config, const DecodeOptions& options);

  // Number of last rows of the prompt, which are always kept.
  int32_t window() const { return window_; }
  // First row whose attention decides; all later rows decide, too.
  virtual int64_t first_row(int64_t num_prompt) const { return num_prompt - window_; }
  // True if a prompt of so many tokens is longer than the budget; otherwise every step attends to everything.
  bool chooses_of(int64_t num_prompt) const { return num_prompt > budget_; }

  // `attention` [num_kv_heads, columns], of one layer: attention paid to position j, summed over the rows that decide
  // and over the group's query heads. Returns for each head the positions of [0, columns) that it keeps, ascending:
  // about budget - window on average over the heads.
  virtual std::vector<std::vector<int32_t>> Keep(std::span<const float> attention, int32_t columns) const = 0;

  // From now on steps attend to lists of at most `longest` positions in front of `first_fresh`, and to all positions
  // from there on.
  void SetKept(int64_t longest, int64_t first_fresh);
  void BeginStep(int64_t kv_len) override;
  ScoringPlan scoring() const override;
  PromptSelector* of_prompt() override { return this; }
  // False: nothing is scored while decoding, because there are only lists.
  bool Chooses(int32_t, int32_t) const override { return false; }
  bool Lists(int32_t layer, int32_t kv_head) const override { return ChoosingSelector::Chooses(layer, kv_head); }
  int64_t most_listed(int64_t num_tokens) const override { return num_tokens; }

 protected:
  const int32_t num_kv_heads_;
  const int32_t budget_, window_;

 private:
  int64_t longest_ = 0;  // length of the longest list; 0: nothing was chosen
  int64_t first_fresh_ = 0;
  int64_t kv_len_ = 0;  // context of the current step
};

}  // namespace spl::engine
