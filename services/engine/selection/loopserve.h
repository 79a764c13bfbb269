// Selector `loopserve`. The first tokens of an answer attend to everything. Then, every `window` tokens, each head
// keeps the tokens that the last `window` queries attended to most, and those generated until the next choice
// (LoopServe 3.3; docs/methods/loopserve.md).
//
// A choice reads all keys, so the layers take turns: each one chooses every `window` steps, and the first choices are
// spread over as many steps, in which layers that have not chosen attend to everything. So no step is much longer than
// the others.
#pragma once

#include "services/engine/selection/choosing_selector.h"

namespace spl::engine {

class LoopServeSelector final : public ChoosingSelector {
 public:
  LoopServeSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes,
                    const DecodeOptions& options);
  std::string_view name() const override { return "loopserve"; }
  // The first layer chooses in the step whose query is number `window`, or later: not before the context is longer than
  // the budget.
  void BeginStep(int64_t kv_len) override;

 private:
  int64_t recorded_ = 0;  // number of queries so far
  int64_t step_ = -1;     // steps since the first layer chose; -1: it did not
};

}  // namespace spl::engine
