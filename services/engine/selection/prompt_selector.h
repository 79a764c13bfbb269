// Base of the selectors that choose by the prompt, before the first step (SnapKV, AdaKV, H2O;
// docs/methods/baselines.md). Each head keeps the positions of the prompt that some of its rows attend to most;
// generated tokens are added. These rows run once more to measure their attention (runtime/prompt_replay.h). All KV
// stays in memory; steps only read less of it.
#pragma once

#include <span>
#include <vector>

#include "services/engine/selection/choosing_selector.h"

namespace spl::engine {

class PromptSelector : public ChoosingSelector {
 public:
  // `scoring`: of the steps that follow; kNone: they attend to what was chosen. REQUIRES: options.window <
  // options.budget.
  PromptSelector(const ModelConfig& config, const DecodeOptions& options, TokenScoring scoring = TokenScoring::kNone);

  // Number of last rows of the prompt, which are always kept.
  int32_t window() const { return window_; }
  // First row whose attention decides; all later rows decide, too.
  virtual int64_t first_row(int64_t num_prompt) const { return num_prompt - window_; }
  // False: every step attends to everything, because a prompt of so many tokens is within the budget.
  virtual bool chooses_of(int64_t num_prompt) const { return num_prompt > budget_; }
  // True: steps go on from the attention of what was chosen, and may leave it out again. Then Keep chooses among all
  // positions, those of the window and generated ones included.
  virtual bool accumulates() const { return false; }

  // `attention` [num_kv_heads, columns], of one layer: attention paid to position j, summed over the rows that decide
  // and over the group's query heads. Columns are the positions in front of the window, or all if it accumulates.
  // Returns for each head the positions of [0, columns) that it keeps, ascending: about budget - window on average over
  // the heads, or at most the budget.
  virtual std::vector<std::vector<int32_t>> Keep(std::span<const float> attention, int32_t columns) const = 0;

  // From now on steps attend to lists of at most `longest` positions in front of `first_fresh`, and to all positions
  // from there on, or to what their scoring makes of these.
  void SetKept(int64_t longest, int64_t first_fresh);
  void BeginStep(int64_t kv_len) override;
  ScoringPlan scoring() const override;
  PromptSelector* of_prompt() override { return this; }
  // False: nothing is scored while decoding, because there are only lists.
  bool Chooses(int32_t, int32_t) const override { return false; }
  bool Lists(int32_t layer, int32_t kv_head) const override { return ChoosingSelector::Chooses(layer, kv_head); }
  int64_t most_listed(int64_t num_tokens) const override { return num_tokens; }

 protected:
  bool has_kept() const { return longest_ > 0; }

  const int32_t num_kv_heads_;
  const int32_t budget_, window_;

 private:
  int64_t longest_ = 0;  // length of the longest list; 0: nothing was chosen
  int64_t first_fresh_ = 0;
  int64_t kv_len_ = 0;  // context of the current step
};

}  // namespace spl::engine
