// A decode method: which resident tokens a query attends to (DESIGN section 2).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/common/visibility.h"
#include "services/engine/cache/stream_classes.h"
#include "services/engine/model/model_config.h"

namespace spl::engine {

// One object per sequence; used by the engine thread only, but for Select: of a model on several ranks each rank's
// thread asks for its own heads, at the same time. Decides, never runs kernels.
class TokenSelector {
 public:
  virtual ~TokenSelector() = default;
  virtual std::string_view name() const = 0;
  virtual bool is_exact() const = 0;
  // What the query of `kv_head` in `layer` attends to in this step. Spans stay valid until the next step.
  virtual kernels::HeadVisibility Select(int32_t layer, int32_t kv_head) = 0;
  // Selectors of one model with equal keys select the same for every layer and head: a recorded step may be replayed.
  virtual uint64_t plan_key() const = 0;
  // False: hardly another sequence selects the same, so that a step is not worth recording for this plan alone.
  virtual bool shares_plan() const { return true; }
};

// By name; "" and "auto" choose the best selector that this build has for a sequence with these head classes, or null:
// with none. Unimplemented for an unknown one. InvalidArgument: one that needs what a sequence with head classes does
// not keep, or classes that there are not.
absl::StatusOr<std::unique_ptr<TokenSelector>> MakeTokenSelector(std::string_view name, const ModelConfig& config,
                                                                 std::shared_ptr<const StreamClasses> classes);
std::vector<std::string> TokenSelectorNames();

}  // namespace spl::engine
