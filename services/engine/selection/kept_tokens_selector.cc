#include "services/engine/selection/kept_tokens_selector.h"

#include <algorithm>
#include <utility>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/selection/prompt_selector.h"

namespace spl::engine {

KeptTokensSelector::KeptTokensSelector(const ModelConfig& config, std::shared_ptr<const KeptTokens> kept,
                                       std::unique_ptr<TokenSelector> inner)
    : kept_(std::move(kept)),
      inner_(std::move(inner)),
      num_kv_heads_(config.num_kv_heads),
      kv_len_(int64_t{kept_->num_tokens} + 1),
      layers_(config.num_layers) {
  SPLICE_CHECK(kept_->layers.size() == layers_.size(), "a list for each layer");
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    SPLICE_CHECK(config.visibility(layer).rule == kernels::VisibilityRule::kFull, "a model without windows");
    counts_.push_back(CountOf(kept_->layers[layer]));
    longest_ = std::max(longest_, counts_.back());
  }
  for (kernels::LayerSelection& layer : layers_) layer.listed = true;
}

void KeptTokensSelector::BeginStep(int64_t kv_len) {
  kv_len_ = kv_len;
  if (inner_ == nullptr) return;
  inner_->BeginStep(longest_ + (kv_len - kept_->num_tokens));
  const TokenScoring scoring = inner_->scoring().scoring;
  // Positions gathered before are counted in tokens of the layer that keeps most.
  const bool counts_tokens = scoring == TokenScoring::kCompactKeys || scoring == TokenScoring::kPageBounds;
  const auto steps = inner_->layers();
  for (size_t i = 0; i < layers_.size(); ++i) {
    kernels::LayerSelection& layer = layers_[i];
    layer = steps.empty() ? kernels::LayerSelection{} : steps[i];
    layer.listed = true;
    if (counts_tokens && layer.compact_len > 0) layer.compact_len -= static_cast<int32_t>(longest_ - counts_[i]);
    const kernels::HeadVisibility seen = inner_->Select(static_cast<int32_t>(i), 0);
    if (seen.rule != kernels::VisibilityRule::kBand) continue;
    layer.num_sinks = seen.num_sinks;
    layer.window = seen.window;
  }
}

ScoringPlan KeptTokensSelector::scoring() const {
  ScoringPlan plan = inner_ == nullptr ? ScoringPlan{} : inner_->scoring();
  plan.first_fresh = kept_->num_tokens;
  plan.listed_tokens = longest_ + std::max<int64_t>(kv_len_ - kept_->num_tokens, 1);
  return plan;
}

KeptPositions KeptTokensSelector::lists() const {
  KeptPositions lists;
  for (const PositionRanges& layer : kept_->layers) {
    std::vector<int32_t> list;
    list.reserve(CountOf(layer));
    for (const PositionRange& range : layer) {
      for (int32_t p = range.begin; p < range.end; ++p) list.push_back(p);
    }
    lists.insert(lists.end(), static_cast<size_t>(num_kv_heads_), list);
  }
  return lists;
}

}  // namespace spl::engine
