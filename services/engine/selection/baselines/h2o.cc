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
    : PromptSelector(config, WithRecentHalf(options)) {}

std::vector<std::vector<int32_t>> H2oSelector::Keep(std::span<const float> attention, int32_t columns) const {
  std::vector<std::vector<int32_t>> kept(num_kv_heads_);
  std::vector<uint32_t> bits(columns);
  for (size_t h = 0; h < kept.size(); ++h) {
    const auto of_head = attention.subspan(h * bits.size(), bits.size());
    std::transform(of_head.begin(), of_head.end(), bits.begin(), kernels::WeightBits);
    kept[h].resize(std::min(budget_ - window_, columns));
    kernels::ChooseLargest(bits, static_cast<int64_t>(kept[h].size()), 0, kept[h].data());
  }
  return kept;
}

}  // namespace spl::engine
