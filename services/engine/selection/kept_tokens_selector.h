// Selector `kept_tokens`, for a prompt some of whose tokens were left out (SamKV; docs/methods/samkv.md). In each layer
// a query sees the tokens that the layer keeps and everything behind the prompt, or the part of these that another
// selector chooses. The lists are in the sequence's compact pages, on the device (BeginLists,
// kernels/selection/candidates.h); a step only says where they end.
//
// The inner selector is asked as if the kept tokens of a layer, followed by the tokens behind the prompt, were the
// whole sequence. Budgets, sinks, windows and recent tokens therefore count tokens that are there, in their order, not
// positions of the prompt. The length at which choices begin is counted the same way, in the layer that keeps most. A
// method thus attends to the tokens that it would attend to if the prompt had never had the others; only its keys and
// queries are still rotated by their true positions.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "services/engine/cache/kept_tokens.h"
#include "services/engine/selection/token_selector.h"

namespace spl::engine {

class KeptTokensSelector final : public TokenSelector {
 public:
  // REQUIRES: a list for each layer of `config`, which has no sliding windows. `inner`: any selector of the model
  // without head classes; null: queries see all that is kept.
  KeptTokensSelector(const ModelConfig& config, std::shared_ptr<const KeptTokens> kept,
                     std::unique_ptr<TokenSelector> inner = nullptr);
  // The name of the inner selector, if there is one.
  std::string_view name() const override { return inner_ == nullptr ? "kept_tokens" : inner_->name(); }
  bool is_exact() const override { return false; }
  void BeginStep(int64_t kv_len) override;
  // The step's lists say what each head sees.
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
  int64_t longest_ = 0;          // largest of counts_
  int64_t kv_len_;               // context of the current step
  std::vector<kernels::LayerSelection> layers_;
};

}  // namespace spl::engine
