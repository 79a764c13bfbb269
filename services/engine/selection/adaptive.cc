#include "services/engine/selection/adaptive.h"

#include <limits>
#include <utility>

#include "services/base/check.h"

namespace spl::engine {

AdaptiveSelector::AdaptiveSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes,
                                   const DecodeOptions& options)
    : SparCasSelector(config, std::move(classes), options),
      mass_floor_(options.mass_floor),
      guarded_(static_cast<size_t>(config.num_layers) * config.num_kv_heads) {
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    for (int32_t h = 0; h < config.num_kv_heads; ++h) {
      if (!ChoosingSelector::Chooses(layer, h)) guarded_[Number(layer, h)] = {kNever, kNever};
    }
  }
}

void AdaptiveSelector::Decide(bool chooses, int64_t kv_len) {
  SPLICE_CHECK(!chooses || may_choose(kv_len), "a context that is long enough to choose from");
  chooses_ = chooses;
  if (!chooses) Rest();
}

void AdaptiveSelector::BeginStep(int64_t kv_len) {
  guarded_key_ = 0;
  if (!chooses_) return;
  SparCasSelector::BeginStep(kv_len);
  last_choice_ = kv_len_ = kv_len;
  for (size_t i = 0; i < guarded_.size(); ++i) {
    if (guarded_[i].in(kv_len)) guarded_key_ = (guarded_key_ ^ (i + 1)) * 0x9e3779b97f4a7c15ull + 1;
  }
}

kernels::HeadVisibility AdaptiveSelector::Select(int32_t layer, int32_t kv_head) {
  if (guarded_key_ != 0 && guarded_[Number(layer, kv_head)].in(kv_len_)) return Unchosen(layer, kv_head);
  return SparCasSelector::Select(layer, kv_head);
}

uint64_t AdaptiveSelector::plan_key() const { return SparCasSelector::plan_key() ^ guarded_key_; }

bool AdaptiveSelector::shares_plan() const { return guarded_key_ == 0 && SparCasSelector::shares_plan(); }

void AdaptiveSelector::Guard(int32_t layer, int32_t kv_head, int64_t first, int64_t last) {
  guarded_[Number(layer, kv_head)] = {first, last};
}

}  // namespace spl::engine
