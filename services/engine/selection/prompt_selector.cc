#include "services/engine/selection/prompt_selector.h"

#include <algorithm>

#include "services/base/check.h"

namespace spl::engine {

PromptSelector::PromptSelector(const ModelConfig& config, const DecodeOptions& options, TokenScoring scoring)
    : ChoosingSelector(config, nullptr,
                       {.scoring = scoring,
                        .first_layer = options.dense_layers,
                        .budget = options.budget,
                        .recent = options.window}),
      num_kv_heads_(config.num_kv_heads),
      budget_(options.budget),
      window_(options.window) {
  SPLICE_CHECK(window_ >= 1 && window_ < budget_, "a window within the budget");
}

void PromptSelector::SetKept(int64_t longest, int64_t first_fresh) {
  longest_ = longest;
  first_fresh_ = first_fresh;
}

void PromptSelector::BeginStep(int64_t kv_len) {
  kv_len_ = kv_len;
  if (longest_ == 0) return;
  SetStep(/*scores=*/true, /*chosen=*/true);
  for (const int32_t number : choosing_layers()) layer(number).listed = true;
}

ScoringPlan PromptSelector::scoring() const {
  ScoringPlan now = plan();
  if (longest_ == 0) return now;
  now.first_fresh = static_cast<int32_t>(first_fresh_);
  now.listed_tokens = longest_ + std::max<int64_t>(kv_len_ - first_fresh_, 1);
  return now;
}

}  // namespace spl::engine
