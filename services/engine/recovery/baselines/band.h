// Baselines `a-shape` and `tri-shape` (docs/methods/baselines.md). Every head of every layer sees the first band_sinks
// tokens (128) and a window of band_window (3968). With tri-shape the last band_last_rows rows of the prompt (100) see
// everything. If the model has a window of its own, the shorter one counts. Copies of segments are not used.
#pragma once

#include <algorithm>
#include <vector>

#include "services/engine/recovery/recovery_policy.h"
#include "services/engine/recovery/reuse_options.h"

namespace spl::engine {

class BandPolicy final : public RecoveryPolicy {
 public:
  BandPolicy(const ModelConfig& config, const ReuseOptions& options) : RecoveryPolicy(config), options_(options) {}
  std::string_view name() const override { return opens_last_rows() ? "tri-shape" : "a-shape"; }
  bool reuses_segments() const override { return false; }
  bool is_exact(const ReuseLayout&) const override { return false; }
  bool runs_alone(const ReuseLayout&) const override { return true; }
  LayerPlan PlanLayer(int32_t layer) override;

 protected:
  PrefillStage FirstColdStage(const ReuseLayout& layout) override {
    PrefillStage stage = AllRows(layout);
    if (opens_last_rows()) stage.open_from = std::max(0, layout.num_tokens - options_.band_last_rows);
    return stage;
  }

 private:
  bool opens_last_rows() const { return options_.policy == "tri-shape"; }

  const ReuseOptions options_;
  std::vector<kernels::HeadVisibility> visibility_;
};

}  // namespace spl::engine
