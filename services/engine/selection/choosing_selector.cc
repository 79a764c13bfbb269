#include "services/engine/selection/choosing_selector.h"

#include <utility>

#include "services/base/check.h"

namespace spl::engine {

ChoosingSelector::ChoosingSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes,
                                   const ScoringPlan& plan)
    : config_(config), classes_(std::move(classes)), plan_(plan), layers_(config.num_layers) {
  SPLICE_CHECK(classes_ == nullptr || OfModel(*classes_, config), "a class for each head of the model");
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    bool any = false;
    for (int32_t h = 0; h < config.num_kv_heads; ++h) any |= ChoosingSelector::Chooses(layer, h);
    if (any) choosing_layers_.push_back(layer);
  }
}

bool ChoosingSelector::Chooses(int32_t layer, int32_t kv_head) const {
  return layer >= plan_.first_layer && Unchosen(layer, kv_head).rule == kernels::VisibilityRule::kFull;
}

kernels::HeadVisibility ChoosingSelector::Select(int32_t layer, int32_t kv_head) {
  if (Attends(layer) && ChoosingSelector::Chooses(layer, kv_head))
    return {.rule = plan_.scoring == TokenScoring::kPackedKeys ? kernels::VisibilityRule::kElsewhere
                                                               : kernels::VisibilityRule::kSelected};
  return Unchosen(layer, kv_head);
}

uint64_t ChoosingSelector::plan_key() const {
  const uint64_t unchosen = classes_ == nullptr ? 0 : classes_->key();
  if (!chosen_) return unchosen;
  const uint64_t packed = plan_.scoring == TokenScoring::kPackedKeys ? 0x8b4d21f03c6ea759ull : 0;
  uint64_t key =
      (unchosen ^ packed ^ (0xa24baed4963ee407ull + static_cast<uint64_t>(plan_.first_layer))) * 0x9fb21c651e98df25ull;
  for (const int32_t layer : choosing_layers_) {
    if (!Attends(layer)) key = (key ^ static_cast<uint64_t>(layer + 1)) * 0x9fb21c651e98df25ull;
  }
  return key;
}

void KeyScoringSelector::BeginStep(int64_t kv_len) {
  if (!active_ && kv_len <= 2 * int64_t{plan().budget}) return;
  if (active_) ++step_;
  skipped_ = active_ ? kv_len - written_ - 1 : 0;
  active_ = true;
  SetStep(/*scores=*/true, /*chosen=*/true);
  for (const int32_t number : choosing_layers()) {
    kernels::LayerSelection& selection = layer(number);
    selection.selects = true;
    selection.compact_len = static_cast<int32_t>(written_);
    PlanLayer(number, step_, selection);
  }
  written_ = kv_len;
}

}  // namespace spl::engine
