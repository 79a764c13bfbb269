#include "services/engine/selection/head_classes_selector.h"

#include <utility>

#include "services/base/check.h"

namespace spl::engine {

HeadClassesSelector::HeadClassesSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes)
    : config_(config), classes_(std::move(classes)) {
  SPLICE_CHECK(
      classes_ != nullptr && static_cast<int64_t>(classes_->size()) == int64_t{config.num_layers} * config.num_kv_heads,
      "a class for each head of the model");
}

kernels::HeadVisibility HeadClassesSelector::Select(int32_t layer, int32_t kv_head) {
  const auto stream = static_cast<size_t>(layer) * static_cast<size_t>(config_.num_kv_heads) + kv_head;
  return ClassVisibility((*classes_)[stream], config_.visibility(layer));
}

}  // namespace spl::engine
