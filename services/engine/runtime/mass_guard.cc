#include "services/engine/runtime/mass_guard.h"

#include <algorithm>
#include <utility>

namespace spl::engine {

MassGuard::MassGuard(const ModelConfig& config, std::unique_ptr<TokenSelector> everything)
    : config_(config), everything_(std::move(everything)) {
  probe_.everything = everything_.get();
  probe_.kept.resize(static_cast<size_t>(config.num_layers) * config.num_qo_heads);
}

MassProbe* MassGuard::Begin(int64_t kv_len) {
  everything_->BeginStep(kv_len);
  std::fill(probe_.kept.begin(), probe_.kept.end(), -1.0f);
  return &probe_;
}

// A KV head keeps what the worst of its query heads keeps; heads that saw everything have no share.
void MassGuard::End(AdaptiveSelector& selector, int64_t kv_len) {
  measured_ = kv_len;
  report_ = StepChoice{};
  const int32_t group = config_.num_qo_heads / config_.num_kv_heads;
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    for (int32_t kv_head = 0; kv_head < config_.num_kv_heads; ++kv_head) {
      std::optional<double> least;
      for (int32_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const double kept = probe_.kept[layer * config_.num_qo_heads + h];
        if (kept >= 0) least = std::min(kept, least.value_or(kept));
      }
      if (!least.has_value()) continue;
      report_->least_mass = std::min(*least, report_->least_mass.value_or(*least));
      if (*least >= selector.mass_floor()) continue;
      selector.Guard(layer, kv_head, kv_len + kGuarded);
      ++report_->guarded_heads;
    }
  }
}

void MassGuard::Describe(StepChoice& step) {
  if (!report_.has_value()) return;
  step.guarded_heads = report_->guarded_heads;
  step.least_mass = report_->least_mass;
  report_.reset();
}

}  // namespace spl::engine
