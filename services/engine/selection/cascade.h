// Selector `cascade`: LoopServe in front of SparCas (LoopServe 3.3, SparCas 3; docs/methods/loopserve.md, "Cascade").
// Every `window` tokens each head keeps the `candidates` tokens that the last `window` queries attended to most, and
// those generated until the next choice. In each step it attends to the `budget` best of these, by the dimensions of
// their keys in which the query is largest. A list that is chosen every `window` tokens has what the queries at that
// time asked for; the next value of an answer is in the larger one.
//
// The layers take turns as those of `loopserve` do, and those that have not chosen attend to everything. Compact keys
// are those of the kept tokens alone: they are gathered anew with each choice of these.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "services/engine/selection/choosing_selector.h"

namespace spl::engine {

class CascadeSelector final : public ChoosingSelector {
 public:
  // Steps between two choices of dimensions. They cost little: the keys of `candidates` tokens are read, not all.
  static constexpr int64_t kDimsInterval = 4;

  // REQUIRES: options.candidates >= options.budget.
  CascadeSelector(const ModelConfig& config, std::shared_ptr<const StreamClasses> classes,
                  const DecodeOptions& options);
  std::string_view name() const override { return "cascade"; }
  // The first layer chooses in the step whose query is number `window`, or later: not before the context is longer than
  // the budget.
  void BeginStep(int64_t kv_len) override;
  const OuterChoice* outer() const override { return &outer_; }

 private:
  std::vector<kernels::LayerSelection> outer_layers_;
  OuterChoice outer_;
  std::vector<int32_t> kept_;  // [num_layers]: tokens that the last step's outer choice kept
  int64_t recorded_ = 0;       // number of queries so far
  int64_t step_ = -1;          // steps since the first layer chose; -1: it did not
};

}  // namespace spl::engine
