#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/common/kv_rows.h"
#include "kernels/selection/h2o/heavy_hitters_host.h"

namespace spl::kernels::ref {

absl::Status HeavyHitters(const KernelContext&, const HeavyHittersArgs& a) {
  const int32_t group = a.shape.num_kv_heads > 0 ? a.shape.num_qo_heads / a.shape.num_kv_heads : 0;
  const int32_t dim = a.shape.head_dim;
  return kernels::HeavyHitters(a, [&](const HeavyHitterStream& x) {
    std::vector<double> sums(x.list.size()), row(x.list.size());
    for (int32_t g = 0; g < group; ++g) {
      double most = -std::numeric_limits<double>::infinity(), total = 0;
      for (size_t k = 0; k < x.list.size(); ++k) {
        const int32_t position = x.list[k];
        const std::byte* keys = a.pool.k(x.page_table[static_cast<size_t>(position / kPageTokens)]);
        double dot = 0;
        for (int32_t c = 0; c < dim; ++c)
          dot += double{x.q[int64_t{g} * dim + c]} * KvElement(a.pool, keys, position % kPageTokens, c);
        row[k] = dot * a.shape.sm_scale;
        most = std::max(most, row[k]);
      }
      for (double& score : row) total += score = std::exp(score - most);
      for (size_t k = 0; k < row.size(); ++k) sums[k] += row[k] / total;
    }
    std::transform(sums.begin(), sums.end(), x.attention.begin(), [](double sum) { return static_cast<float>(sum); });
    return absl::OkStatus();
  });
}

}  // namespace spl::kernels::ref
