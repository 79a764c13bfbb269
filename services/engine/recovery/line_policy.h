// Base of the prefill methods that choose lines (loopserve.h, minference.h). Every row of a cold span is computed; some
// heads of the upper layers attend only to chosen columns and slashes (docs/methods/loopserve.md,
// docs/methods/splice.md and docs/methods/baselines.md).
//
// X̂ of 5.1 is the whole span, not a slice of it, for three reasons. A selection costs the same for any number of rows
// (select_lines.h), so that one for each slice of 512 rows would cost more than the attention it saves. l_s and l_v are
// lengths over the span. The sampled rows must be spread over the rows that use the lines, and include the last of
// them. All queries of a layer are therefore computed before its attention: above the dense layers a stage is one layer
// with all rows (PrefillStage::whole), and hidden states are kept between two layers.
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
  // False if it chooses lines: they mask attention, so that everything above the first layer with lines is approximate.
  // Provenance of a token is the same for all layers.
  bool is_exact(const ReuseLayout& layout) const final { return !Chooses(layout); }
  bool runs_alone(const ReuseLayout& layout) const final { return Chooses(layout); }
  LayerPlan PlanLayer(int32_t layer) final;
  std::optional<PrefillStage> NextStage(const ReuseLayout& layout, std::span<const int32_t> selected) final;

 protected:
  // Whether lines pay for this span.
  virtual bool UsesLines(const ReuseLayout& layout) const = 0;
  // Number of first layers that are the same as in an exact prefill.
  virtual int32_t dense_layers() const = 0;
  // Fills in the options and sampled rows of `task`, for a span of `rows` in a layer whose window is not limited by the
  // model. `task.kv_heads` comes with all such heads. A policy takes out the heads that do not choose, and sets their
  // `visibility`.
  virtual void FillTask(int32_t layer, const kernels::LineRows& rows, LineTask& task,
                        std::span<kernels::HeadVisibility> visibility) const = 0;

  void Prepare(const ReuseLayout& layout) final;
  PrefillStage FirstColdStage(const ReuseLayout& layout) final;

 private:
  // Whether UsesLines, and some layer can use them.
  bool Chooses(const ReuseLayout& layout) const;
  PrefillStage LayerStage(const ReuseLayout& layout, int32_t layer) const;

  bool uses_lines_ = false;
  kernels::LineRows rows_;
  int32_t next_layer_ = 0;
  LineTask task_;
  std::vector<kernels::HeadVisibility> visibility_;
};

// Scrambles seeds by (span, layer). Equal prompts sample the same rows on every worker and in every run; other layers
// sample other rows. (5.1 seeds by request id; a request that is dispatched again could then give another answer.)
uint64_t LineSeed(const kernels::LineRows& rows, int32_t layer);

// `count` rows spread over num_rows, none of them in `samples` (ascending). Fewer if there are not enough.
std::vector<int32_t> HeldOutRows(int32_t num_rows, std::span<const int32_t> samples, uint64_t seed, int32_t count);

}  // namespace spl::engine
