#include "services/engine/runtime/logit_agreement.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "services/base/check.h"

namespace spl::engine {
namespace {

constexpr size_t kTop = 10;

// Numbers of the largest, the largest first; ties to the lower number.
std::vector<int32_t> Largest(std::span<const float> values) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  const size_t count = std::min(kTop, order.size());
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end(),
                    [&](int32_t a, int32_t b) {
                      const float x = values[a], y = values[b];
                      return x != y ? x > y : a < b;
                    });
  order.resize(count);
  return order;
}

}  // namespace

double CosineOf(std::span<const float> a, std::span<const float> b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += double{a[i]} * b[i];
    aa += double{a[i]} * a[i];
    bb += double{b[i]} * b[i];
  }
  return ab / std::sqrt(std::max(aa * bb, 1e-300));
}

LogitAgreement CompareLogits(std::span<const float> approximate, std::span<const float> exact) {
  SPLICE_CHECK(!exact.empty() && approximate.size() == exact.size(), "logits of one vocabulary");
  const auto got = Largest(approximate), want = Largest(exact);
  const auto shared = std::count_if(want.begin(), want.end(),
                                    [&](int32_t id) { return std::find(got.begin(), got.end(), id) != got.end(); });
  return {.cosine = CosineOf(approximate, exact),
          .top1 = got[0] == want[0],
          .top10 = static_cast<double>(shared) / static_cast<double>(want.size())};
}

}  // namespace spl::engine
