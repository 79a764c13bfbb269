#include <algorithm>
#include <cmath>

#include "kernels/common/parallel.h"
#include "kernels/moe/routing.h"

namespace spl::kernels::cpu {
namespace {

// Keeps the best top_k so far in ascending rank. Most experts fail the comparison with the last of them, so that a row
// costs little more than one pass over its logits.
void ChooseExperts(const float* logits, int32_t num_experts, int32_t top_k, int32_t* ids) {
  const auto value = [&](int32_t e) { return std::isnan(logits[e]) ? -INFINITY : logits[e]; };
  // NaN counts as -infinity and, as a tie with a true -infinity, still has to come after it.
  const auto before = [&](int32_t x, int32_t y) {
    return value(x) > value(y) || (std::isnan(logits[y]) && !std::isnan(logits[x]));
  };
  int32_t count = 0;
  for (int32_t e = 0; e < num_experts; ++e) {
    if (count == top_k && !before(e, ids[top_k - 1])) continue;
    int32_t at = count < top_k ? count++ : top_k - 1;
    for (; at > 0 && before(e, ids[at - 1]); --at) ids[at] = ids[at - 1];
    ids[at] = e;
  }
}

void RouteRow(const RouteExpertsArgs& a, int64_t row) {
  const float* logits = a.logits + row * a.num_experts;
  int32_t* ids = a.expert_ids + row * a.top_k;
  float* weights = a.weights + row * a.top_k;
  ChooseExperts(logits, a.num_experts, a.top_k, ids);
  const float largest = logits[ids[0]];
  float sum = 0;
  for (int32_t k = 0; k < a.top_k; ++k) weights[k] = std::exp(logits[ids[k]] - largest);
  // Renormalised, the sum over all experts cancels.
  if (a.renormalize) {
    for (int32_t k = 0; k < a.top_k; ++k) sum += weights[k];
  } else {
    for (int32_t e = 0; e < a.num_experts; ++e) sum += std::exp(logits[e] - largest);
  }
  for (int32_t k = 0; k < a.top_k; ++k) weights[k] /= sum;
}

}  // namespace

absl::Status RouteExperts(const KernelContext& ctx, const RouteExpertsArgs& a) {
  if (absl::Status s = ValidateRouteExperts(a); !s.ok()) return s;
  // 1 Ki exponentials are about 10 us.
  ParallelRows(ctx, a.num_rows, 1024 / a.num_experts, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) RouteRow(a, row);
  });
  // A counting sort: pairs are visited in order, so that an expert's places are in the order of rows.
  const int64_t num_pairs = a.num_rows * a.top_k;
  std::fill(a.offsets, a.offsets + a.num_experts + 1, 0);
  for (int64_t pair = 0; pair < num_pairs; ++pair) ++a.offsets[a.expert_ids[pair] + 1];
  for (int32_t e = 0; e < a.num_experts; ++e) a.offsets[e + 1] += a.offsets[e];
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int32_t place = a.offsets[a.expert_ids[pair]]++;
    a.rows[place] = static_cast<int32_t>(pair / a.top_k);
    a.places[pair] = place;
  }
  // Each offset has moved to its successor's value.
  for (int32_t e = a.num_experts; e > 0; --e) a.offsets[e] = a.offsets[e - 1];
  a.offsets[0] = 0;
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
