// PrefillAttention over the queries of the sampled rows gives their log-sum-exp. Then there is one task per (KV head,
// page): it widens the page's keys once and runs all samples at or past it.
#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/attention/attention_isa.h"
#include "kernels/common/parallel.h"
#include "kernels/common/scratch.h"
#include "kernels/selection/loopserve/line_sums.h"
#include "kernels/selection/loopserve/line_sums_isa.h"

namespace spl::kernels::cpu {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

struct Samples {
  std::vector<int32_t> positions;
  std::vector<float> q;    // [samples, num_qo_heads, head_dim]
  std::vector<float> lse;  // [samples, num_qo_heads]
};

absl::Status TakeLse(const KernelContext& ctx, const LineWeightsArgs& a, Samples& s) {
  std::vector<float> out(s.q.size());
  const PrefillSequence rows{0, static_cast<int32_t>(s.positions.size()), s.positions, a.rows.heads};
  return PrefillAttention(ctx, {.shape = a.shape,
                                .pool = a.pool,
                                .q = s.q.data(),
                                .q_row_stride = int64_t{a.shape.num_qo_heads} * a.shape.head_dim,
                                .out = out.data(),
                                .lse = s.lse.data(),
                                .sequences = {&rows, 1}});
}

// The queries of one KV head, its query heads under each other, scaled for exp2.
struct HeadQueries {
  int32_t kv_head = 0;
  std::vector<float> q, lse;
};

HeadQueries Pack(const LineWeightsArgs& a, const Samples& s, int32_t kv_head) {
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads, dim = a.shape.head_dim;
  const float scale = a.shape.sm_scale * kLog2E;
  HeadQueries out{kv_head, {}, {}};
  for (size_t r = 0; r < s.positions.size(); ++r) {
    for (int32_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      const size_t at = r * static_cast<size_t>(a.shape.num_qo_heads) + static_cast<size_t>(h);
      for (int32_t c = 0; c < dim; ++c) out.q.push_back(s.q[at * static_cast<size_t>(dim) + c] * scale);
      out.lse.push_back(s.lse[at] * kLog2E);
    }
  }
  return out;
}

void WritePage(const KernelContext& ctx, const LineWeightsArgs& a, const Samples& s, const HeadQueries& head,
               int32_t page) {
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads, dim = a.shape.head_dim;
  const auto first = static_cast<size_t>(std::lower_bound(s.positions.begin(), s.positions.end(), page * kPageTokens) -
                                         s.positions.begin());
  const size_t num_rows = (s.positions.size() - first) * static_cast<size_t>(group);
  if (num_rows == 0) return;
  thread_local Scratch scratch;
  float* keys = scratch.Floats((static_cast<size_t>(dim) + num_rows) * kPageTokens);
  float* weights = keys + static_cast<size_t>(dim) * kPageTokens;
  const HeadStreamView& stream = a.rows.heads[static_cast<size_t>(head.kv_head)];
  const int32_t num_tokens = std::min(kPageTokens, stream.kv_len - page * kPageTokens);
  AttentionKernelsFor(ctx.isa).transpose_keys(a.pool.k(stream.page_table[static_cast<size_t>(page)]), a.pool.dtype, dim,
                                              num_tokens, keys);
  const size_t skip = first * static_cast<size_t>(group);
  LineSumsKernelsFor(ctx.isa).page_weights({.q = head.q.data() + skip * static_cast<size_t>(dim),
                                            .lse = head.lse.data() + skip,
                                            .keys = keys,
                                            .weights = weights,
                                            .num_rows = static_cast<int32_t>(num_rows),
                                            .head_dim = dim});
  for (size_t r = first; r < s.positions.size(); ++r) {
    const float* from = weights + (r - first) * static_cast<size_t>(group) * kPageTokens;
    float* to =
        a.weights +
        (int64_t{head.kv_head} * static_cast<int64_t>(s.positions.size()) + static_cast<int64_t>(r)) * a.stride +
        int64_t{page} * kPageTokens;
    const int32_t count = std::min(kPageTokens, s.positions[r] + 1 - page * kPageTokens);
    for (int32_t j = 0; j < count; ++j) {
      float sum = 0;
      for (int32_t h = 0; h < group; ++h) sum += from[h * kPageTokens + j];
      to[j] = sum;
    }
  }
}

}  // namespace

absl::Status LineWeights(const KernelContext& ctx, const LineWeightsArgs& a) {
  if (absl::Status s = ValidateLineWeights(a); !s.ok()) return s;
  const size_t row = static_cast<size_t>(a.shape.num_qo_heads) * a.shape.head_dim;
  Samples s{{},
            std::vector<float>(a.samples.size() * row),
            std::vector<float>(a.samples.size() * static_cast<size_t>(a.shape.num_qo_heads))};
  for (size_t r = 0; r < a.samples.size(); ++r) {
    s.positions.push_back(a.rows.positions[static_cast<size_t>(a.samples[r])]);
    const float* q = a.q + (a.rows.row_begin + a.samples[r]) * a.q_row_stride;
    std::copy(q, q + row, s.q.begin() + static_cast<int64_t>(r * row));
  }
  if (absl::Status status = TakeLse(ctx, a, s); !status.ok()) return status;
  std::vector<int32_t> heads(a.kv_heads.begin(), a.kv_heads.end());
  if (heads.empty()) {
    heads.resize(static_cast<size_t>(a.shape.num_kv_heads));
    std::iota(heads.begin(), heads.end(), 0);
  }
  std::vector<HeadQueries> queries(heads.size());
  ParallelTasks(ctx, static_cast<int64_t>(heads.size()),
                [&](int64_t i) { queries[static_cast<size_t>(i)] = Pack(a, s, heads[static_cast<size_t>(i)]); });
  const int64_t pages = s.positions.back() / kPageTokens + 1;
  ParallelTasks(ctx, pages * static_cast<int64_t>(heads.size()), [&](int64_t i) {
    WritePage(ctx, a, s, queries[static_cast<size_t>(i / pages)], static_cast<int32_t>(i % pages));
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
