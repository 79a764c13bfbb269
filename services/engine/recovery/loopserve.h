// Policy `loopserve`, for cold spans of at least line_min_span rows (LoopServe 3.2; docs/methods/loopserve.md and
// docs/methods/splice.md). Every layer above the dense ones attends only to lines: the fewest that get the share
// line_alpha of the attention of line_samples sampled rows. The paper's main text has alpha .955, its sweep recommends
// .99 and more; the default here is .995. Shorter spans are computed exactly, and so are prompts of a model whose
// layers all have windows.
//
// If the request asks for head classes, global heads choose lines, and local ones see their sinks and window. Nothing
// is restored, and feed-forward is dense.
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
