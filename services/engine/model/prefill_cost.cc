#include "services/engine/model/prefill_cost.h"

#include <algorithm>
#include <numeric>

namespace spl::engine {

PrefillCost::PrefillCost(const ModelConfig& config) : attention_(4.0 * config.q_size()) {
  const double hidden = config.hidden_size;
  const double projections = hidden * (2.0 * config.q_size() + 2.0 * config.kv_size());
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    const double feed_forward =
        config.is_moe_layer(layer)
            ? hidden * (config.moe.num_experts + 3.0 * config.moe.num_experts_per_token * config.moe.intermediate_size)
            : hidden * 3.0 * config.intermediate_size;
    linear_.push_back(2 * (projections + feed_forward));
    windows_.push_back(config.sliding_windows.empty() ? 0 : config.sliding_windows[layer]);
  }
}

double PrefillCost::OfRow(int64_t position, int32_t begin, int32_t end) const {
  double cost = 0;
  for (int32_t layer = begin; layer < end; ++layer) {
    const int32_t window = windows_[layer];
    const int64_t seen = window > 0 ? std::min<int64_t>(window, position + 1) : position + 1;
    cost += linear_[layer] + attention_ * static_cast<double>(seen);
  }
  return cost;
}

double PrefillCost::Of(std::span<const int32_t> positions, int32_t begin, int32_t end) const {
  double cost = 0;
  for (const int32_t position : positions) cost += OfRow(position, begin, end);
  return cost;
}

double PrefillCost::Of(int64_t first, int64_t count) const {
  double cost = 0;
  for (int64_t position = first; position < first + count; ++position)
    cost += OfRow(position, 0, static_cast<int32_t>(linear_.size()));
  return cost;
}

double PrefillCost::PerToken() const { return std::accumulate(linear_.begin(), linear_.end(), 0.0); }

double PrefillCost::PerPair() const {
  return attention_ * static_cast<double>(std::count(windows_.begin(), windows_.end(), 0));
}

}  // namespace spl::engine
