// Policy `loopserve`: of a cold span of at least line_min_span rows, every layer above the dense ones attends to lines
// only, the fewest that have the share line_alpha of the attention of line_samples sampled rows (LoopServe 3.2;
// docs/methods/loopserve.md and docs/methods/splice.md). The paper's main text has alpha .955, its sweep recommends .99
// and more: .995 by default. Shorter spans, and prompts of a model whose layers all have windows, are computed exactly.
//
// With head classes, where the request asks for them, global heads choose lines and local ones see their sinks and
// window; nothing is restored, and feed-forward is dense.
#pragma once

#include "services/engine/recovery/line_policy.h"
#include "services/engine/recovery/reuse_options.h"

namespace spl::engine {

class LoopServePolicy final : public LinePolicy {
 public:
  // `map` outlives the policy; null: all heads are global.
  LoopServePolicy(const ModelConfig& config, const ReuseOptions& options, const HeadClassMap* map)
      : LinePolicy(config), options_(options), map_(map) {}
  std::string_view name() const override { return "loopserve"; }

 protected:
  bool UsesLines(const ReuseLayout& layout) const override;
  int32_t dense_layers() const override { return options_.dense_layers >= 0 ? options_.dense_layers : kDenseLayers; }
  void FillTask(int32_t layer, const kernels::LineRows& rows, LineTask& task,
                std::span<kernels::HeadVisibility> visibility) const override;

 private:
  static constexpr int32_t kDenseLayers = 2;

  const ReuseOptions options_;
  const HeadClassMap* const map_;
};

}  // namespace spl::engine
