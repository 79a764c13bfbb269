// What prefill methods that choose lines have in common (loopserve.h, minference.h): a cold span, every row of it, with
// some heads of the upper layers looking only at chosen columns and slashes (docs/methods/loopserve.md and
// docs/methods/splice.md and docs/methods/baselines.md).
//
// X̂ of 5.1 is the whole span and not a slice of it. What a selection costs does not depend on the number of rows
// (select_lines.h), so that one for each slice of 512 rows costs more than the attention it saves; l_s and l_v are
// lengths over the span; and the rows whose attention is sampled must be spread over, and include the last of, what the
// lines are for. All queries of a layer therefore come before its attention: above the dense layers a stage is one
// layer with all rows (PrefillStage::whole), and hidden states wait between two layers.
//
// Copies of segments are not used: lines are for spans that are contiguous and fresh (6.4).
#pragma once

#include <cstdint>
#include <vector>

#include "services/engine/recovery/recovery_policy.h"

namespace spl::engine {

class LinePolicy : public RecoveryPolicy {
 public:
  using RecoveryPolicy::RecoveryPolicy;
  bool reuses_segments() const final { return false; }
  // A line masks; what lies above the first layer with lines is approximate, and the tokens' provenance is one for all
  // layers.
  bool is_exact(const ReuseLayout& layout) const final { return !Chooses(layout); }
  bool runs_alone(const ReuseLayout& layout) const final { return Chooses(layout); }
  LayerPlan PlanLayer(int32_t layer) final;
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) final;

 protected:
  // Whether a span is worth it.
  virtual bool UsesLines(const ReuseLayout& layout) const = 0;
  // First layers that are those of an exact prefill.
  virtual int32_t dense_layers() const = 0;
  // Of a layer that the model lets see everything: rows and lines, of a span of `rows`. kv_heads: all that do; a policy
  // takes out those that do not choose, and says in `visibility` what they see.
  virtual void FillTask(int32_t layer, const kernels::LineRows& rows, LineTask& task,
                        std::span<kernels::HeadVisibility> visibility) const = 0;

  void Prepare(const ReuseLayout& layout) final;
  PrefillStage FirstColdStage(const ReuseLayout& layout) final;

 private:
  // UsesLines, and there is a layer for it.
  bool Chooses(const ReuseLayout& layout) const;
  PrefillStage LayerStage(const ReuseLayout& layout, int32_t layer) const;

  bool uses_lines_ = false;
  kernels::LineRows rows_;
  int32_t next_layer_ = 0;
  LineTask task_;
  std::vector<kernels::HeadVisibility> visibility_;
};

// A number for (span, layer) that scrambles seeds: equal prompts sample the same rows on every worker and in every
// run, other layers other rows. (5.1 seeds by request id; then a request that is dispatched again could answer
// otherwise.)
uint64_t LineSeed(const kernels::LineRows& rows, int32_t layer);

// `count` rows spread over num_rows, none of them in `samples` (ascending). Fewer when there are not so many.
std::vector<int32_t> HeldOutRows(int32_t num_rows, std::span<const int32_t> samples, uint64_t seed, int32_t count);

}  // namespace spl::engine
