#include "services/engine/selection/token_selector.h"

#include <utility>

#include "services/base/status.h"
#include "services/engine/selection/dense.h"
#include "services/engine/selection/head_classes_selector.h"

namespace spl::engine {

std::vector<std::string> TokenSelectorNames() { return {"dense", "head_classes"}; }

absl::StatusOr<std::unique_ptr<TokenSelector>> MakeTokenSelector(std::string_view name, const ModelConfig& config,
                                                                 std::shared_ptr<const StreamClasses> classes) {
  if (name.empty() || name == "auto") name = classes == nullptr ? "dense" : "head_classes";
  if (name == "dense") {
    if (classes != nullptr)
      return InvalidArgument(
          "decode selector 'dense' needs all of the KV, but behind this reuse policy local heads only keep their "
          "window: set full_kv, or leave the selector out");
    return std::make_unique<DenseSelector>(config);
  }
  if (name == "head_classes") {
    if (classes == nullptr)
      return InvalidArgument(
          "decode selector 'head_classes' needs a prompt computed with head classes: reuse policy redknot, splice or "
          "splice+, without full_kv");
    return std::make_unique<HeadClassesSelector>(config, std::move(classes));
  }
  return Errorf(absl::StatusCode::kUnimplemented, "decode selector '{}' is not served by this build; it has: {}", name,
                fmt::join(TokenSelectorNames(), ", "));
}

}  // namespace spl::engine
