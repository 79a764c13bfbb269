// Chooses the lines (columns and slashes) of one layer of a span, on any device: its memory, and its report.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/backend/backend.h"
#include "kernels/backend/session.h"
#include "kernels/selection/loopserve/select_lines.h"
#include "services/engine/recovery/recovery_policy.h"

namespace spl::engine {

// Result of choosing lines, over the KV heads and layers of one prompt. The fields are sums, so that ranks can be
// added.
struct LineReport {
  int64_t heads = 0;        // KV heads times layers that chose
  int64_t dense_heads = 0;  // those of them that fell back to dense attention
  // Certificate of docs/methods/loopserve.md. `sampled`: attention of the sampled rows. `covered`: a lower bound of the
  // part of it on the lines.
  double sampled = 0, covered = 0;
  // Only for layers that were measured. `cells`: attention cells that were computed (whole tiles, and single columns).
  // `causal_cells`: those of a causal prefill of the same rows and heads.
  double cells = 0, causal_cells = 0;
  // Attention that rows outside of the sample pay to what they see, at most 1 for each head and layer. held_out_lowest:
  // the lowest of these.
  double held_out_mass = 0;
  int64_t held_out_heads = 0;
  double held_out_lowest = 1;

  void Add(const LineReport& other);
  // 1 if nothing was chosen, or nothing was measured.
  double covered_share() const { return sampled > 0 ? covered / sampled : 1; }
  double cell_share() const { return causal_cells > 0 ? cells / causal_cells : 1; }
  double held_out_share() const { return held_out_heads > 0 ? held_out_mass / static_cast<double>(held_out_heads) : 1; }
};

// Attention mass of the held-out rows on the lines, by KV head.
using LineFidelity = std::vector<double>;

// Owns device memory, grown on demand: for a span of n keys about 2.5 KiB n at 8 KV heads and 64 samples. One thread,
// one layer at a time.
class LineAttention {
 public:
  LineAttention(const kernels::Backend& backend, kernels::Session& session) : backend_(backend), session_(session) {}

  struct Call {
    kernels::AttentionShape shape;
    kernels::KvPoolView pool;
    kernels::ConstActivations q;  // queries of the span
    int64_t q_row_stride = 0;
    kernels::PrefillSequence rows;  // the span; every head sees everything
    int32_t layer = 0;
    const LineTask* task = nullptr;
    int32_t first_kv_head = 0;  // the rank's first head
  };
  // The heads of this rank that chose, ascending; empty if none of the task's heads is on this rank. Asynchronous, as
  // SelectLines.
  absl::StatusOr<std::span<const int32_t>> Select(const Call& call);
  // Visibility of a head that chose. Valid until the next Select.
  kernels::HeadVisibility Visibility(int32_t head) const {
    return {.rule = kernels::VisibilityRule::kLines, .lines = &visibilities_[head]};
  }
  // Waits for the device. Counts cells if `cells`. `fidelity` has an entry for each head of the rank, or is empty.
  absl::Status Report(bool cells, const LineFidelity& fidelity, LineReport& report);

 private:
  absl::Status CountCells(LineReport& report);

  const kernels::Backend& backend_;
  kernels::Session& session_;
  std::unique_ptr<kernels::Buffer> memory_;
  kernels::LinePlan plan_;
  std::vector<int32_t> heads_;
  std::vector<kernels::LineVisibility> visibilities_;  // [num_kv_heads]
};

// Cells that a head computes: bits of `tiles` and `column_masks` in LineVisibility's layout, both in host memory.
double CountLineCells(const kernels::LineVisibility& lines, const uint64_t* tiles, const uint64_t* column_masks);

}  // namespace spl::engine
