// Baseline `minference` (docs/methods/baselines.md, [MI]). The attention of the last 64 rows of a prompt is measured.
// Every KV head of every layer then attends to the columns and slashes that got most of it: line_columns (1000) and
// line_slashes (6096) of them, in tiles of 64 x 64. The first 30 columns and the nearest 30 slashes are always
// included.
//
// Differs from the published code in two points. The query heads of a KV head share one choice, made by the sum of
// their attention; the code chooses for each query head. All heads use the same numbers; the code takes some from an
// offline search.
#pragma once

#include <algorithm>

#include "services/engine/recovery/line_policy.h"
#include "services/engine/recovery/reuse_options.h"

namespace spl::engine {

class MInferencePolicy final : public LinePolicy {
 public:
  MInferencePolicy(const ModelConfig& config, const ReuseOptions& options) : LinePolicy(config), options_(options) {}
  std::string_view name() const override { return "minference"; }

 protected:
  bool UsesLines(const ReuseLayout&) const override { return true; }
  int32_t dense_layers() const override { return std::max(0, options_.dense_layers); }
  void FillTask(int32_t layer, const kernels::LineRows& rows, LineTask& task,
                std::span<kernels::HeadVisibility> visibility) const override;

 private:
  const ReuseOptions options_;
};

}  // namespace spl::engine
