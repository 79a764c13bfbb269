// What selectors that choose once share: before the first step, by what rows of the prompt attend to, each head keeps
// positions of the prompt; what is generated joins (SnapKV, AdaKV, H2O; docs/methods/baselines.md). The rows are run
// once more for this (runtime/prompt_replay.h). All of the KV stays, only less of it is read.
#pragma once

#include <span>
#include <vector>

#include "services/engine/selection/choosing_selector.h"

namespace spl::engine {

class PromptSelector : public ChoosingSelector {
 public:
  // REQUIRES: options.window < options.budget.
  PromptSelector(const ModelConfig& config, const DecodeOptions& options);

  // Last rows of the prompt, which are kept.
  int32_t window() const { return window_; }
  // The rows from here on are those whose attention decides.
  virtual int64_t first_row(int64_t num_prompt) const { return num_prompt - window_; }
  // Whether a prompt of so many tokens is longer than what is kept of it; else every step attends to everything.
  bool chooses_of(int64_t num_prompt) const { return num_prompt > budget_; }

  // attention [num_kv_heads, columns] of one layer: the sum over these rows and the group's query heads of what they
  // pay to position j. Returns for each head the positions kept of [0, columns), ascending; of all heads together
  // about budget - window each.
  virtual std::vector<std::vector<int32_t>> Keep(std::span<const float> attention, int32_t columns) const = 0;

  // From now on steps attend to lists of at most `longest` positions in front of `first_fresh`, and all behind it.
  void SetKept(int64_t longest, int64_t first_fresh);
  void BeginStep(int64_t kv_len) override;
  ScoringPlan scoring() const override;
  PromptSelector* of_prompt() override { return this; }
  // Nothing is scored while decoding: there are only lists.
  bool Chooses(int32_t, int32_t) const override { return false; }
  bool Lists(int32_t layer, int32_t kv_head) const override { return ChoosingSelector::Chooses(layer, kv_head); }
  int64_t most_listed(int64_t num_tokens) const override { return num_tokens; }

 protected:
  const int32_t num_kv_heads_;
  const int32_t budget_, window_;

 private:
  int64_t longest_ = 0;  // of the lists; 0: nothing was chosen
  int64_t first_fresh_ = 0;
  int64_t kv_len_ = 0;  // of the step
};

}  // namespace spl::engine
