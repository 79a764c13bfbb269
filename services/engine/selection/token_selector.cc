#include "services/engine/selection/token_selector.h"

#include "services/base/status.h"
#include "services/engine/selection/dense.h"

namespace spl::engine {

std::vector<std::string> TokenSelectorNames() { return {"dense"}; }

absl::StatusOr<std::unique_ptr<TokenSelector>> MakeTokenSelector(std::string_view name, const ModelConfig& config) {
  if (name.empty() || name == "auto" || name == "dense") return std::make_unique<DenseSelector>(config);
  return Errorf(absl::StatusCode::kUnimplemented, "decode selector '{}' is not served by this build; it has: {}", name,
                fmt::join(TokenSelectorNames(), ", "));
}

}  // namespace spl::engine
