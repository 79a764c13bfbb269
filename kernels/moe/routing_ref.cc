#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/moe/routing.h"

namespace spl::kernels::ref {
namespace {

void RouteRow(const RouteExpertsArgs& a, int64_t row) {
  const float* logits = a.logits + row * a.num_experts;
  std::vector<int32_t> order(static_cast<size_t>(a.num_experts));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) {
    return logits[x] > logits[y] || (std::isnan(logits[y]) && !std::isnan(logits[x]));
  });
  double sum = 0, chosen = 0;
  for (int32_t e = 0; e < a.num_experts; ++e) sum += std::exp(static_cast<double>(logits[e]) - logits[order[0]]);
  std::vector<double> p(static_cast<size_t>(a.top_k));
  for (int32_t k = 0; k < a.top_k; ++k) {
    p[k] = std::exp(static_cast<double>(logits[order[k]]) - logits[order[0]]) / sum;
    chosen += p[k];
  }
  for (int32_t k = 0; k < a.top_k; ++k) {
    a.expert_ids[row * a.top_k + k] = order[k];
    a.weights[row * a.top_k + k] = static_cast<float>(a.renormalize ? p[k] / chosen : p[k]);
  }
}

}  // namespace

absl::Status RouteExperts(const KernelContext&, const RouteExpertsArgs& a) {
  if (absl::Status s = ValidateRouteExperts(a); !s.ok()) return s;
  for (int64_t row = 0; row < a.num_rows; ++row) RouteRow(a, row);
  int32_t place = 0;
  for (int32_t e = 0; e < a.num_experts; ++e) {
    a.offsets[e] = place;
    for (int64_t pair = 0; pair < a.num_rows * a.top_k; ++pair) {
      if (a.expert_ids[pair] != e) continue;
      a.rows[place] = static_cast<int32_t>(pair / a.top_k);
      a.places[pair] = place++;
    }
  }
  a.offsets[a.num_experts] = place;
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
