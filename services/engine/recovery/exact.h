// Policy `exact`: causal prefill of every row with the model's own visibility. Every other policy is measured against
// it (docs/methods/splice.md).
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "services/engine/cache/segment_summary.h"
#include "services/engine/recovery/recovery_policy.h"

namespace spl::engine {

class ExactPolicy final : public RecoveryPolicy {
 public:
  // `segments`: ranges whose summaries are recorded during the prefill; disjoint and ascending. A segment is skipped if
  // the prefix contains some of its local tiles.
  explicit ExactPolicy(const ModelConfig& config, PositionRanges segments = {})
      : RecoveryPolicy(config), segments_(std::move(segments)) {}
  std::string_view name() const override { return "exact"; }
  bool reuses_segments() const override { return false; }
  void TakeQueryMeans(std::vector<float> means) override { means_ = std::move(means); }
  void TakeAttended(std::vector<std::vector<int32_t>> positions) override { attended_ = std::move(positions); }

  SegmentSummary LocalSummaryOf(const PositionRange& segment) const override {
    SegmentSummary summary;
    const auto at = static_cast<size_t>(std::find(noted_.begin(), noted_.end(), segment) - noted_.begin());
    if (at == noted_.size() || means_.empty()) return summary;
    const size_t size = means_.size() / noted_.size();
    const std::span<const float> mean = std::span(means_).subspan(at * size, size);
    summary.local_query.assign(mean.begin(), mean.end());
    for (const int32_t position : attended_[at]) summary.attended.push_back(position - segment.begin);
    return summary;
  }

 protected:
  PrefillStage FirstColdStage(const ReuseLayout& layout) override {
    PrefillStage stage = AllRows(layout);
    for (const PositionRange& segment : segments_) {
      if (LocalTilesOf(segment).begin < layout.num_prefix) continue;
      noted_.push_back(segment);
      stage.query_means.push_back(LocalTilesOf(segment));
      stage.attention_to.push_back(MiddleTilesOf(segment));
    }
    return stage;
  }

 private:
  const PositionRanges segments_;
  PositionRanges noted_;      // those that are recorded
  std::vector<float> means_;  // for noted_
  std::vector<std::vector<int32_t>> attended_;
};

}  // namespace spl::engine
