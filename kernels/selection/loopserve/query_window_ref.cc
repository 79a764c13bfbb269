#include <cmath>
#include <limits>
#include <vector>

#include "kernels/common/kv_rows.h"
#include "kernels/selection/loopserve/query_window_host.h"

namespace spl::kernels::ref {

absl::Status ChooseByQueryWindow(const KernelContext&, const QueryWindowArgs& a) {
  const int32_t group = a.shape.num_kv_heads > 0 ? a.shape.num_qo_heads / a.shape.num_kv_heads : 0;
  const int32_t dim = a.shape.head_dim;
  return kernels::ChooseByQueryWindow(a, [&](const QueryWindowStream& x) {
    std::vector<double> sums(x.scores.size()), row(x.scores.size());
    for (int32_t b = 0; b < x.num_queries; ++b) {
      const int32_t sees = x.candidates.count() - (x.num_queries - 1 - b);
      for (int32_t g = 0; g < group; ++g) {
        const float* q = x.queries.data() + (int64_t{b} * group + g) * dim;
        double most = -std::numeric_limits<double>::infinity(), total = 0;
        for (int32_t j = 0; j < sees; ++j) {
          const int32_t position = x.candidates.position(j);
          const std::byte* keys = a.pool.k(x.page_table[static_cast<size_t>(position / kPageTokens)]);
          double dot = 0;
          for (int32_t c = 0; c < dim; ++c) dot += double{q[c]} * KvElement(a.pool, keys, position % kPageTokens, c);
          row[static_cast<size_t>(j)] = dot * a.shape.sm_scale;
          most = std::max(most, row[static_cast<size_t>(j)]);
        }
        for (int32_t j = 0; j < sees; ++j) total += std::exp(row[static_cast<size_t>(j)] - most);
        for (int32_t j = 0; j < sees; ++j)
          sums[static_cast<size_t>(j)] += std::exp(row[static_cast<size_t>(j)] - most) / total;
      }
    }
    for (size_t j = 0; j < sums.size(); ++j) x.scores[j] = static_cast<float>(sums[j]);
    return absl::OkStatus();
  });
}

}  // namespace spl::kernels::ref
