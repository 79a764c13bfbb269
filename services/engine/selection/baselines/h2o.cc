#include "services/engine/selection/baselines/h2o.h"

#include <algorithm>

#include "kernels/selection/token_choice.h"

namespace spl::engine {
namespace {

DecodeOptions WithRecentHalf(DecodeOptions options) {
  options.window = options.budget - options.budget / 2;
  return options;
}

}  // namespace

H2oSelector::H2oSelector(const ModelConfig& config, const DecodeOptions& options)
    : PromptSelector(config, WithRecentHalf(options), TokenScoring::kHeavyHitters) {}

// Nothing has left before the context is longer than the budget: everything is attended to.
void H2oSelector::BeginStep(int64_t kv_len) {
  if (!has_kept()) return;
  SetStep(/*scores=*/true, /*chosen=*/kv_len > budget_);
  for (const int32_t number : choosing_layers()) layer(number).selects = true;
}

std::vector<std::vector<int32_t>> H2oSelector::Keep(std::span<const float> attention, int32_t columns) const {
  std::vector<std::vector<int32_t>> kept(num_kv_heads_);
  std::vector<uint32_t> bits(columns);
  for (size_t h = 0; h < kept.size(); ++h) {
    const auto of_head = attention.subspan(h * bits.size(), bits.size());
    std::transform(of_head.begin(), of_head.end(), bits.begin(), kernels::WeightBits);
    kept[h].resize(std::min(budget_, columns));
    kernels::ChooseLargest(bits, static_cast<int64_t>(kept[h].size()), std::min(window_, columns), kept[h].data());
  }
  return kept;
}

}  // namespace spl::engine
