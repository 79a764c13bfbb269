// Sums the rotated queries of some rows, in every layer, and the attention that these rows pay.
#pragma once

#include "services/engine/execution/observers/layer_observer.h"
#include "services/engine/model/position_ranges.h"

namespace spl::engine {

class QueryMeans final : public LayerObserver {
 public:
  struct Group {
    PositionRange rows;
    double* sums = nullptr;  // host, [num_layers, num_qo_heads * head_dim] of the model; a rank adds to its own heads'
    // Positions before the rows, all of them visible to the rows. Their attention in every layer whose attention runs
    // is added to `scores`, device memory, [attention_to.size()]. Empty: attention is not summed.
    PositionRange attention_to;
    float* scores = nullptr;
  };
  explicit QueryMeans(std::vector<Group> groups) : groups_(std::move(groups)) {}
  void BeginPass(std::span<const int32_t> positions) override;
  absl::Status AfterKv(const LayerView& view) override;
  bool wants_lse(int32_t layer, const LayerPlan& plan) const override;
  absl::Status AfterAttention(const LayerView& view) override;

 private:
  bool AsksForAttention(size_t group) const {
    return rows_[group].size() > 0 && groups_[group].attention_to.size() > 0;
  }

  const std::vector<Group> groups_;
  PositionRanges rows_;  // [groups], rows of the slice
};

}  // namespace spl::engine
