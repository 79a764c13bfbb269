// One task for each page that holds columns: it widens the page of every KV head once and runs all rows against it.
#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/attention/attention_isa.h"
#include "kernels/attention/visible_pages.h"
#include "kernels/common/parallel.h"
#include "kernels/common/scratch.h"
#include "kernels/selection/sparsex/column_scores.h"
#include "kernels/selection/sparsex/column_scores_isa.h"

namespace spl::kernels::cpu {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

// The part of a column range inside one page, and where its scores go.
struct PageColumns {
  int32_t page = 0;
  int32_t first_slot = 0;
  int32_t num_slots = 0;
  float* scores = nullptr;
};

std::vector<PageColumns> SplitByPage(const ColumnScoresArgs& a) {
  std::vector<PageColumns> parts;
  float* scores = a.scores;
  for (const PositionRange& range : a.columns) {
    for (int32_t j = range.begin; j < range.end;) {
      const int32_t slot = j % kPageTokens, count = std::min(range.end - j, kPageTokens - slot);
      parts.push_back({j / kPageTokens, slot, count, scores});
      scores += count;
      j += count;
    }
  }
  return parts;
}

// The probes' queries of one KV head, its query heads under each other, scaled for exp2.
struct HeadQueries {
  int32_t kv_head = 0;
  std::vector<float> q, lse;
};

HeadQueries Pack(const ColumnScoresArgs& a, int32_t kv_head) {
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads, dim = a.shape.head_dim;
  HeadQueries out{kv_head, {}, {}};
  out.q.reserve(a.probes.size() * static_cast<size_t>(group) * dim);
  const float scale = a.shape.sm_scale * kLog2E;
  for (const int32_t probe : a.probes) {
    const int64_t row = a.rows.row_begin + probe;
    for (int32_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      const float* q = a.q + row * a.q_row_stride + static_cast<int64_t>(h) * dim;
      for (int32_t c = 0; c < dim; ++c) out.q.push_back(q[c] * scale);
      out.lse.push_back(a.lse[row * a.shape.num_qo_heads + h] * kLog2E);
    }
  }
  return out;
}

void AddPage(const KernelContext& ctx, const ColumnScoresArgs& a, std::span<const HeadQueries> queries,
             const PageColumns& part) {
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads, dim = a.shape.head_dim;
  // Rows before the page see nothing of it; probes ascend.
  const auto first = std::partition_point(a.probes.begin(), a.probes.end(), [&](int32_t probe) {
    return a.rows.positions[static_cast<size_t>(probe)] < part.page * kPageTokens;
  });
  const size_t skipped = static_cast<size_t>(first - a.probes.begin()), rows = (a.probes.size() - skipped) * group;
  if (rows == 0) return;
  thread_local std::vector<uint64_t> visible;
  thread_local Scratch scratch;
  float* keys = scratch.Floats(static_cast<size_t>(dim) * kPageTokens);
  alignas(64) float sums[kPageTokens] = {};
  for (const HeadQueries& head : queries) {
    const HeadStreamView& stream = a.rows.heads[static_cast<size_t>(head.kv_head)];
    const int32_t physical = stream.page_table[static_cast<size_t>(part.page)];
    if (physical == kNoPage) continue;
    const VisiblePages slots(stream.visibility);
    visible.clear();
    for (auto probe = first; probe != a.probes.end(); ++probe)
      visible.insert(visible.end(), static_cast<size_t>(group),
                     slots.Slots(part.page, a.rows.positions[static_cast<size_t>(*probe)]));
    const int32_t num_tokens = std::min(kPageTokens, stream.kv_len - part.page * kPageTokens);
    AttentionKernelsFor(ctx.isa).transpose_keys(a.pool.k(physical), a.pool.dtype, dim, num_tokens, keys);
    const size_t skip = skipped * static_cast<size_t>(group);
    ColumnScoresKernelsFor(ctx.isa).add_page({.q = head.q.data() + skip * dim,
                                              .lse = head.lse.data() + skip,
                                              .visible = visible.data(),
                                              .keys = keys,
                                              .sums = sums,
                                              .num_rows = static_cast<int32_t>(rows),
                                              .head_dim = dim});
  }
  for (int32_t i = 0; i < part.num_slots; ++i) part.scores[i] += sums[part.first_slot + i];
}

}  // namespace

absl::Status ColumnScores(const KernelContext& ctx, const ColumnScoresArgs& a) {
  if (absl::Status s = ValidateColumnScores(a); !s.ok()) return s;
  if (a.probes.empty()) return absl::OkStatus();
  std::vector<int32_t> heads(a.kv_heads.begin(), a.kv_heads.end());
  if (heads.empty()) {
    heads.resize(static_cast<size_t>(a.shape.num_kv_heads));
    std::iota(heads.begin(), heads.end(), 0);
  }
  std::vector<HeadQueries> queries(heads.size());
  ParallelTasks(ctx, static_cast<int64_t>(heads.size()),
                [&](int64_t i) { queries[static_cast<size_t>(i)] = Pack(a, heads[static_cast<size_t>(i)]); });
  const std::vector<PageColumns> parts = SplitByPage(a);
  ParallelTasks(ctx, static_cast<int64_t>(parts.size()),
                [&](int64_t i) { AddPage(ctx, a, queries, parts[static_cast<size_t>(i)]); });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
