// Baseline `minference` (docs/methods/baselines.md, [MI]): the last 64 rows of a prompt are asked, and every KV head of
// every layer attends to the columns and slashes that got most of their attention, line_columns and line_slashes of
// them (1000, 6096), in tiles of 64 x 64. The first 30 columns and the nearest 30 slashes are always part.
//
// Here one choice serves the query heads of a KV head, whose attention is added up; the published code chooses for each
// query head, and has other numbers for some heads by an offline search.
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
