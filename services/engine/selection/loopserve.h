// Selector `loopserve`: the first tokens of an answer attend to everything; then, every `window` tokens, each head
// keeps what the last `window` queries attended to most, and what is generated until the next choice (LoopServe 3.3;
// docs/methods/loopserve.md).
#pragma once

#include "services/engine/selection/choosing_selector.h"

namespace spl::engine {

class LoopServeSelector final : public ChoosingSelector {
 public:
  LoopServeSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes,
                    const DecodeOptions& options);
  std::string_view name() const override { return "loopserve"; }
  // The first step that chooses is the one that has `window` queries with its own; a context within the budget needs no
  // choice before it is longer.
  void BeginStep(int64_t kv_len) override;

 private:
  int64_t recorded_ = 0;  // queries so far
  int64_t since_ = -1;    // steps since the last choice; -1: none was made
};

}  // namespace spl::engine
