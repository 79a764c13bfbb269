// Policy `exact`: causal prefill of every row with the model's own visibility; the oracle that every other policy is
// measured against (algorithms.md 6.2).
#pragma once

#include <utility>
#include <vector>

#include "services/engine/recovery/recovery_policy.h"

namespace spl::engine {

class ExactPolicy final : public RecoveryPolicy {
 public:
  // `wanted`: ranges, disjoint and ascending, whose mean queries are noted on the way; those of which the prefix has a
  // part are not.
  explicit ExactPolicy(const ModelConfig& config, PositionRanges wanted = {})
      : RecoveryPolicy(config), wanted_(std::move(wanted)) {}
  std::string_view name() const override { return "exact"; }
  bool reuses_segments() const override { return false; }
  void TakeQueryMeans(std::vector<float> means) override { means_ = std::move(means); }

  // Behind the run: the mean query of `range` in every layer, [num_layers, num_qo_heads, head_dim]; empty where it was
  // not noted.
  std::vector<float> QueryMeanOf(const PositionRange& range) const {
    for (size_t i = 0; i < noted_.size() && !means_.empty(); ++i) {
      if (noted_[i].begin != range.begin || noted_[i].end != range.end) continue;
      const auto size = static_cast<std::ptrdiff_t>(means_.size() / noted_.size()),
                 at = static_cast<std::ptrdiff_t>(i) * size;
      return {means_.begin() + at, means_.begin() + at + size};
    }
    return {};
  }

 protected:
  PrefillStage FirstColdStage(const ReuseLayout& layout) override {
    for (const PositionRange& range : wanted_) {
      if (range.begin >= layout.num_prefix) noted_.push_back(range);
    }
    PrefillStage stage = AllRows(layout);
    stage.query_means = noted_;
    return stage;
  }

 private:
  const PositionRanges wanted_;
  PositionRanges noted_;
  std::vector<float> means_;  // of noted_
};

}  // namespace spl::engine
