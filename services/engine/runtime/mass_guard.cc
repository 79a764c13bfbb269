#include "services/engine/runtime/mass_guard.h"

#include <algorithm>
#include <utility>

namespace spl::engine {

MassGuard::MassGuard(const ModelConfig& config, std::unique_ptr<TokenSelector> everything)
    : config_(config), everything_(std::move(everything)) {
  if (everything_ == nullptr) return;
  probe_.everything = everything_.get();
  probe_.kept.resize(static_cast<size_t>(config.num_layers) * config.num_qo_heads);
}

void MassGuard::Take(AdaptiveSelector& selector, int64_t kv_len, const KeptMass& mass, size_t row) {
  if (mass.values.empty()) return;
  report_ = StepChoice{};
  for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
    for (int32_t kv_head = 0; kv_head < config_.num_kv_heads; ++kv_head) {
      if (selector.MayGuard(layer, kv_head, kv_len))
        Judge(selector, layer, kv_head, mass.of(layer, row, kv_head), kv_len + 2);
    }
  }
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
      if (least.has_value()) Judge(selector, layer, kv_head, *least, kv_len + 1);
    }
  }
}

void MassGuard::Judge(AdaptiveSelector& selector, int32_t layer, int32_t kv_head, double kept, int64_t guards_from) {
  report_->least_mass = std::min(kept, report_->least_mass.value_or(kept));
  if (kept >= selector.mass_floor()) return;
  selector.Guard(layer, kv_head, guards_from, guards_from + kGuarded - 1);
  ++report_->guarded_heads;
}

void MassGuard::Describe(StepChoice& step) {
  if (!report_.has_value()) return;
  step.guarded_heads = report_->guarded_heads;
  step.least_mass = report_->least_mass;
  report_.reset();
}

}  // namespace spl::engine
