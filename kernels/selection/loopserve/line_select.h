// LoopServe's online line selection (3.2, Alg. 2, completed as docs/methods/loopserve.md says), for one KV head.
//
// Covers a share alpha of the sample's attention with as few computed cells as possible, greedily. S and V are the
// slashes and columns taken so far, ol_s and ol_v the sums of their largest cells:
//   Δs = max(0, w_s - ol_v),  Δv = max(0, w_v - ol_s)                     for the heaviest line of each kind
//   take the slash if Δs / max(1, l_s - |V|) >= Δv / max(1, l_v - |S|), and count Δs as covered; else the column
// l_s and l_v are the numbers of computed rows in which the line has a cell. A slash and a column share at most one
// cell, so ol_* over-estimates the mass that is counted twice, and the counted mass is a certified lower bound of the
// covered mass. A line that is taken leaves its list. When one list is empty, the other is used. Ties go to the slash,
// then to the lower index.
//
// When Δs = Δv = 0 the bound is stuck, not the method. A new *round* then takes the exact overlaps from the sample: the
// cells of all lines taken so far are struck out of A, lines are weighed anew by what remains, ol_s = ol_v = 0, and the
// greedy continues. In every round but the last, a new round also begins as soon as overlap decides instead of weight:
// when the line to be taken is worth less than half as much per cell as the heaviest line of the other kind would be
// without overlap. (A few strong slashes make ol_s larger than every column's weight; the greedy would then take
// thousands of slashes that only cross those columns.)
//
// Lines that are always included are struck out before the first round. A round weighs kLinesPerRound lines of each
// kind; when they are used up and there are more, the next round begins. After max_rounds rounds, or when a kind of
// line reaches its maximum, the head falls back to dense attention: exact, but without the saving. With a single round
// that is what mostly happens at alpha = 0.995 (line_select_test counts it).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/selection/loopserve/line_sums.h"

namespace spl::kernels {

inline constexpr int32_t kMaxLines = 8192;  // per kind of line and head
inline constexpr int32_t kLinesPerRound = 4096;

struct LineOptions {
  float alpha = 0.995f;  // (0, 1]; the paper's sweep recommends .99 and more, its main text .955
  // Always included: columns [0, forced_columns) and offsets [0, forced_offsets). forced_offsets >= 1, so that every
  // row sees its own tile.
  int32_t forced_columns = 30;
  int32_t forced_offsets = 64;
  int32_t max_columns = kMaxLines;  // including the forced ones; more make the head dense
  int32_t max_offsets = kMaxLines;
  int32_t max_rounds = 6;  // >= 1
  // MInference: set both > 0; alpha is then ignored. Takes the heaviest top_columns columns and top_offsets offsets,
  // including the always-included ones. MInference's defaults: 1000 and 6096, of at most 64 samples (the last rows),
  // with [0, 30) and [0, 100) forced.
  int32_t top_columns = 0;
  int32_t top_offsets = 0;
};

// The rows that will be computed: positions [first_position, first_position + num_rows).
struct LineRows {
  int32_t first_position = 0;
  int32_t num_rows = 0;
  int32_t num_keys() const { return first_position + num_rows; }
};

struct LineChoice {
  std::vector<int32_t> columns, offsets;  // ascending; empty for a dense head
  double total = 0;                       // Σ A
  double uncovered = 0;  // upper bound of the part of it outside all lines; <= (1 - alpha) · total unless dense
  int32_t rounds = 0;
  bool dense = false;
};

// InvalidArgument names the field.
absl::Status ValidateLineOptions(const LineOptions& options);

// Strikes out the cells of the chosen lines in sample.weights. REQUIRES: valid options, at least one sample, and every
// sample is a computed row.
LineChoice SelectLines(const LineOptions& options, const LineRows& rows, const LineSample& sample);

}  // namespace spl::kernels
