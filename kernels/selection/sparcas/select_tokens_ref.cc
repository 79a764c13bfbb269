#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/common/kv_rows.h"
#include "kernels/selection/candidates.h"
#include "kernels/selection/selecting_sequence.h"
#include "kernels/selection/sparcas/compact_keys.h"
#include "kernels/selection/sparcas/select_dims.h"
#include "kernels/selection/sparcas/select_tokens.h"
#include "kernels/selection/token_choice.h"

namespace spl::kernels::ref {
namespace {

// One stream: KV head h of sequence s.
struct Stream {
  const SelectTokensArgs& a;
  const SelectingSequence& s;
  int32_t head;
  const float* q;  // [group, head_dim]
  CompactKeys compact;
  Candidates own;

  int32_t* dims(int parity) const { return s.dims + (2 * int64_t{head} + parity) * a.num_dims; }

  void Gather(int32_t begin, int32_t end, std::span<const int32_t> slots, const int32_t* dims) const {
    for (int32_t j = begin; j < end; ++j) {
      const int32_t position = own.position(j);
      const std::byte* key = a.pool.k(s.page_tables[head][position / kPageTokens]);
      std::byte* to = a.pool.k(s.compact_tables[head][j / compact.page_tokens()]);
      for (const int32_t slot : slots) {
        StoreElement(to, compact.dtype(), compact.element(j) + int64_t{slot} * kPageTokens,
                     KvElement(a.pool, key, position % kPageTokens, dims[slot]));
      }
    }
  }

  std::vector<double> Scores(int32_t h, const int32_t* dims) const {
    std::vector<double> scores(static_cast<size_t>(own.count()));
    for (int32_t j = 0; j < own.count(); ++j) {
      const std::byte* keys = a.pool.k(s.compact_tables[head][j / compact.page_tokens()]);
      double dot = 0;
      for (int32_t slot = 0; slot < a.num_dims; ++slot) {
        dot += double{q[h * a.shape.head_dim + dims[slot]]} *
               LoadElement(keys, compact.dtype(), compact.element(j) + int64_t{slot} * kPageTokens);
      }
      scores[j] = dot * a.shape.sm_scale;
    }
    return scores;
  }
};

void Select(const Stream& x, int32_t group, int32_t* tokens, int32_t* count, float* weights) {
  const SelectingSequence& s = x.s;
  const int32_t* dims = x.dims(s.step.parity);
  std::vector<int32_t> all(static_cast<size_t>(x.a.num_dims));
  std::iota(all.begin(), all.end(), 0);
  const int32_t gathered = s.step.first ? 0 : s.step.compact_len;
  if (s.step.refresh) {
    int32_t* next = x.dims(1 - s.step.parity);
    const std::vector<int32_t> changed =
        SelectDims(x.q, group, x.a.shape.head_dim, x.a.num_dims, s.step.first ? nullptr : dims, next);
    x.Gather(0, gathered, changed, next);
    dims = next;
  }
  const int32_t num = x.own.count();
  x.Gather(gathered, num, all, dims);

  const bool everything = num <= s.budget;
  if (everything) *count = static_cast<int32_t>(x.own.Copy(0, num, tokens) - tokens);
  if (everything && weights == nullptr) return;
  std::vector<double> w(static_cast<size_t>(num), 0.0);
  for (int32_t h = 0; h < group; ++h) {
    std::vector<double> scores = x.Scores(h, dims);
    const double max = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double& score : scores) sum += score = std::exp(score - max);
    for (int32_t j = 0; j < num; ++j) w[j] += scores[j] / sum;
  }
  std::vector<float> rounded(w.begin(), w.end());
  if (weights != nullptr) std::copy(rounded.begin(), rounded.end(), weights);
  if (everything) return;
  std::vector<int32_t> order(static_cast<size_t>(num - s.recent));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t i, int32_t j) { return WeightBits(rounded[i]) > WeightBits(rounded[j]); });
  std::copy_n(order.begin(), s.budget - s.recent, tokens);
  std::iota(tokens + s.budget - s.recent, tokens + s.budget, num - s.recent);
  std::sort(tokens, tokens + s.budget);
  x.own.ToPositions({tokens, static_cast<size_t>(s.budget)});
  *count = s.budget;
}

}  // namespace

absl::Status SelectTokens(const KernelContext&, const SelectTokensArgs& a) {
  if (absl::Status s = ValidateHostSelectTokens(a); !s.ok()) return s;
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads;
  for (size_t i = 0; i < a.sequences.size(); ++i) {
    if (!a.sequences[i].step.selects) continue;
    for (int32_t h = 0; h < a.shape.num_kv_heads; ++h) {
      if (!a.sequences[i].selects(h)) continue;
      const int64_t stream = static_cast<int64_t>(i) * a.shape.num_kv_heads + h;
      const float* q = a.q + static_cast<int64_t>(i) * a.q_row_stride + int64_t{h} * group * a.shape.head_dim;
      Select({a, a.sequences[i], h, q, {a.shape.head_dim, a.num_dims, a.pool.dtype}, {a.pool, a.sequences[i], h}},
             group, a.lists.tokens + stream * a.lists.stride, &a.lists.counts[stream],
             a.weights == nullptr ? nullptr : a.weights + stream * a.weights_stride);
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
