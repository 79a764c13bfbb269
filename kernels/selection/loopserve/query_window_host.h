// Shared by the host variants of ChooseByQueryWindow: everything but the scores.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "kernels/selection/candidates.h"
#include "kernels/selection/loopserve/query_window.h"

namespace spl::kernels {

// A stream to be scored.
struct QueryWindowStream {
  std::span<const int32_t> page_table;
  int32_t kv_len = 0;
  Candidates candidates;  // the positions that are scored
  // The kept queries [num_queries, group, head_dim] by ascending position; the last is that of position kv_len - 1.
  std::vector<float> queries;
  int32_t num_queries = 0;
  std::span<float> scores;  // out, one per candidate
};

// Scores one stream; the streams of a call come one after the other.
using ScoreStream = std::function<absl::Status(const QueryWindowStream&)>;

absl::Status ChooseByQueryWindow(const QueryWindowArgs& args, const ScoreStream& score);

}  // namespace spl::kernels
