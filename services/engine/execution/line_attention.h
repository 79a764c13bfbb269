// Choosing the lines of one layer of a span, on whatever device: the memory that takes, and what is told about it.
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

// What choosing lines came to, over KV heads and layers of one prompt. Sums, so that ranks add up.
struct LineReport {
  int64_t heads = 0;        // KV heads times layers that chose
  int64_t dense_heads = 0;  // of these, such that fell back to everything
  // The certificate of docs/methods/loopserve.md: attention of the sampled rows, and of it a lower bound of what the
  // lines have.
  double sampled = 0, covered = 0;
  // Of the layers that were measured: cells that attention computed (whole tiles, and single columns), and those of a
  // causal prefill of the same rows and heads.
  double cells = 0, causal_cells = 0;
  // Attention that rows outside of the sample pay to what they see, 1 for each head and layer at most; the lowest.
  double held_out_mass = 0;
  int64_t held_out_heads = 0;
  double held_out_lowest = 1;

  void Add(const LineReport& other);
  // 1 where nothing was chosen, or measured.
  double covered_share() const { return sampled > 0 ? covered / sampled : 1; }
  double cell_share() const { return causal_cells > 0 ? cells / causal_cells : 1; }
  double held_out_share() const { return held_out_heads > 0 ? held_out_mass / static_cast<double>(held_out_heads) : 1; }
};

// Mass of the held-out rows on the lines, by KV head.
using LineFidelity = std::vector<double>;

// Owns device memory, grown on demand: of a span of n keys about 2.5 KiB n at 8 KV heads and 64 samples. One thread,
// and one layer at a time.
class LineAttention {
 public:
  LineAttention(const kernels::Backend& backend, kernels::Session& session) : backend_(backend), session_(session) {}

  struct Call {
    kernels::AttentionShape shape;
    kernels::KvPoolView pool;
    kernels::ConstActivations q;  // of the span
    int64_t q_row_stride = 0;
    kernels::PrefillSequence rows;  // the span; every head sees everything
    int32_t layer = 0;
    const LineTask* task = nullptr;
    int32_t first_kv_head = 0;  // of the rank
  };
  // The rank's heads that chose, ascending; empty when none of the task's is the rank's. Asynchronous, as SelectLines.
  absl::StatusOr<std::span<const int32_t>> Select(const Call& call);
  // Of a head that chose. Valid until the next Select.
  kernels::HeadVisibility Visibility(int32_t head) const {
    return {.rule = kernels::VisibilityRule::kLines, .lines = &visibilities_[static_cast<size_t>(head)]};
  }
  // Waits for the device. Cells are counted when `cells`; `fidelity`, of the rank's heads, may be empty.
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

// Cells that a head computes: bits of `tiles` and `column_masks` as LineVisibility lays them out, both host memory.
double CountLineCells(const kernels::LineVisibility& lines, const uint64_t* tiles, const uint64_t* column_masks);

}  // namespace spl::engine
