#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/common/kv_rows.h"
#include "kernels/selection/loopserve/line_sums.h"

namespace spl::kernels::ref {
namespace {

// Adds exp(score - lse) of one query head to A[r, 0 .. position].
void AddHead(const LineWeightsArgs& a, const HeadStreamView& stream, const float* q, int32_t position,
             std::vector<double>& weights) {
  std::vector<double> scores(static_cast<size_t>(position) + 1);
  for (int32_t j = 0; j <= position; ++j) {
    const int32_t page = stream.page_table[static_cast<size_t>(j / kPageTokens)];
    double dot = 0;
    for (int32_t c = 0; c < a.shape.head_dim; ++c)
      dot += double{KvElement(a.pool, a.pool.k(page), j % kPageTokens, c)} * q[c];
    scores[static_cast<size_t>(j)] = dot * a.shape.sm_scale;
  }
  const double max = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (const double s : scores) sum += std::exp(s - max);
  for (size_t j = 0; j < scores.size(); ++j) weights[j] += std::exp(scores[j] - max) / sum;
}

}  // namespace

absl::Status LineWeights(const KernelContext&, const LineWeightsArgs& a) {
  if (absl::Status s = ValidateLineWeights(a); !s.ok()) return s;
  const int32_t group = a.shape.num_qo_heads / a.shape.num_kv_heads;
  for (int32_t g = 0; g < a.shape.num_kv_heads; ++g) {
    if (!a.kv_heads.empty() && !std::binary_search(a.kv_heads.begin(), a.kv_heads.end(), g)) continue;
    for (size_t r = 0; r < a.samples.size(); ++r) {
      const int32_t sample = a.samples[r], position = a.rows.positions[static_cast<size_t>(sample)];
      std::vector<double> weights(static_cast<size_t>(position) + 1);
      for (int32_t h = g * group; h < (g + 1) * group; ++h) {
        AddHead(a, a.rows.heads[static_cast<size_t>(g)],
                a.q + (a.rows.row_begin + sample) * a.q_row_stride + int64_t{h} * a.shape.head_dim, position, weights);
      }
      float* out =
          a.weights + (int64_t{g} * static_cast<int64_t>(a.samples.size()) + static_cast<int64_t>(r)) * a.stride;
      std::copy(weights.begin(), weights.end(), out);
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
