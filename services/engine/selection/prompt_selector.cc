#include "services/engine/selection/prompt_selector.h"

#include <algorithm>

#include "services/base/check.h"

namespace spl::engine {

PromptSelector::PromptSelector(const ModelConfig& config, const DecodeOptions& options)
    : ChoosingSelector(
          config, nullptr,
          {.scoring = TokenScoring::kKeptTokens, .first_layer = options.dense_layers, .budget = options.budget}),
      num_kv_heads_(config.num_kv_heads),
      budget_(options.budget),
      window_(options.window) {
  SPLICE_CHECK(window_ >= 1 && window_ < budget_, "a window within the budget");
}

void PromptSelector::SetKept(int64_t longest, int64_t num_tokens) {
  longest_ = longest;
  first_ = num_tokens;
}

void PromptSelector::BeginStep(int64_t kv_len) {
  kv_len_ = kv_len;
  if (longest_ == 0) return;
  SetStep(/*scores=*/true, /*chosen=*/true);
  for (const int32_t number : choosing_layers()) layer(number).selects = layer(number).records = true;
}

ScoringPlan PromptSelector::scoring() const {
  ScoringPlan now = plan();
  if (longest_ > 0) now.budget = static_cast<int32_t>(longest_ + std::max<int64_t>(kv_len_ - 1 - first_, 0));
  return now;
}

}  // namespace spl::engine
