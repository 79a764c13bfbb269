// Selector `kept_tokens`: behind a prompt of which tokens were left out, a query of each layer sees what that layer
// keeps, and everything behind the prompt (SamKV; docs/methods/samkv.md), or what
// another selector chooses of it. The lists lie in the sequence's compact pages, on the device (BeginLists,
// kernels/selection/candidates.h); a step only says where they end.
//
// The inner selector is asked as if the kept tokens of a layer, and what follows the prompt, were the sequence:
// budgets, sinks, windows and recent tokens count tokens that are there, in their order, and not the positions that the
// prompt once had; so does the length from which on choices begin, by the layer that keeps most. What a method attends
// to is then what it would attend to if the prompt had never had the other tokens, but for its keys and queries, which
// were rotated by their true positions.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "services/engine/cache/kept_tokens.h"
#include "services/engine/selection/token_selector.h"

namespace spl::engine {

class KeptTokensSelector final : public TokenSelector {
 public:
  // `inner`, null for all that is kept: any selector of the model without head classes. REQUIRES: a list for each layer
  // of `config`, which has no sliding windows.
  KeptTokensSelector(const ModelConfig& config, std::shared_ptr<const KeptTokens> kept,
                     std::unique_ptr<TokenSelector> inner = nullptr);
  // That of the selector that chooses.
  std::string_view name() const override { return inner_ == nullptr ? "kept_tokens" : inner_->name(); }
  bool is_exact() const override { return false; }
  void BeginStep(int64_t kv_len) override;
  // What every head sees is in the lists of the step.
  kernels::HeadVisibility Select(int32_t, int32_t) override { return {.rule = kernels::VisibilityRule::kSelected}; }
  uint64_t plan_key() const override { return 0x9d8f3c1a75b2e64dull; }
  ScoringPlan scoring() const override;
  KeptPositions lists() const override;
  bool Lists(int32_t, int32_t) const override { return true; }
  int64_t most_listed(int64_t) const override { return longest_; }
  PromptSelector* of_prompt() override { return inner_ == nullptr ? nullptr : inner_->of_prompt(); }
  bool Chooses(int32_t layer, int32_t kv_head) const override {
    return inner_ != nullptr && inner_->Chooses(layer, kv_head);
  }
  std::span<const kernels::LayerSelection> layers() const override { return layers_; }

 private:
  const std::shared_ptr<const KeptTokens> kept_;
  const std::unique_ptr<TokenSelector> inner_;
  const int32_t num_kv_heads_;
  std::vector<int64_t> counts_;  // [num_layers]: tokens of the prompt that the layer keeps
  int64_t longest_ = 0;          // of these
  int64_t kv_len_;               // of the step
  std::vector<kernels::LayerSelection> layers_;
};

}  // namespace spl::engine
