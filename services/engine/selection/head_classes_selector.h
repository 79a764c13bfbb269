// Selector `head_classes`: the query of a local head sees its sinks and its window, the query of a global or restored
// head everything (RedKnot 3.2, SegPagedAttention; docs/methods/redknot.md, "SegPaged attention").
#pragma once

#include <memory>
#include <vector>

#include "services/engine/selection/token_selector.h"

namespace spl::engine {

class HeadClassesSelector final : public TokenSelector {
 public:
  // REQUIRES: a class for each head stream of the model.
  HeadClassesSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes);
  std::string_view name() const override { return "head_classes"; }
  bool is_exact() const override { return false; }
  uint64_t plan_key() const override { return classes_->key(); }
  bool shares_plan() const override { return !classes_->of_one_sequence(); }
  kernels::HeadVisibility Select(int32_t layer, int32_t kv_head) override;

 private:
  const ModelConfig& config_;  // the model's; the model outlives its sequences
  const std::shared_ptr<const StreamClasses> classes_;
};

}  // namespace spl::engine
