#include "services/engine/selection/head_classes_selector.h"

#include <utility>

#include "services/base/check.h"

namespace spl::engine {

HeadClassesSelector::HeadClassesSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes)
    : config_(config), classes_(std::move(classes)) {
  SPLICE_CHECK(classes_ != nullptr && OfModel(*classes_, config), "a class for each head of the model");
}

kernels::HeadVisibility HeadClassesSelector::Select(int32_t layer, int32_t kv_head) {
  return VisibilityOf(classes_.get(), config_, layer, kv_head);
}

}  // namespace spl::engine
