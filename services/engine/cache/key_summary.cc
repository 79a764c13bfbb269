#include "services/engine/cache/key_summary.h"

#include <cmath>
#include <limits>

#include "kernels/common/kv_rows.h"
#include "services/base/check.h"

namespace spl::engine {
namespace {

constexpr int32_t kKeys = kernels::kPageTokens;

// `sums` is scratch of head_dim.
void SummarizePage(const std::byte* page, kernels::DType dtype, std::vector<double>& sums, std::byte* out) {
  const auto dim = static_cast<int32_t>(sums.size());
  const auto key = [&](int32_t j, int32_t c) { return kernels::KvElement(dtype, dim, page, j, c); };
  std::fill(sums.begin(), sums.end(), 0.0);
  for (int32_t j = 0; j < kKeys; ++j) {
    for (int32_t c = 0; c < dim; ++c) sums[c] += key(j, c);
  }
  int32_t far = 0;
  double farthest = -1;
  for (int32_t j = 0; j < kKeys; ++j) {
    double distance = 0;
    for (int32_t c = 0; c < dim; ++c) {
      const double d = key(j, c) - sums[c] / kKeys;
      distance += d * d;
    }
    if (distance > farthest) {
      farthest = distance;
      far = j;
    }
  }
  const kernels::DType derived = kernels::DerivedKeyType(dtype);
  for (int32_t c = 0; c < dim; ++c) {
    const float apart = key(far, c);
    kernels::StoreElement(out, derived, c, apart);
    kernels::StoreElement(out, derived, dim + c, static_cast<float>((sums[c] - apart) / (kKeys - 1)));
  }
}

}  // namespace

size_t KeySummaryBytes(int32_t num_pages, int32_t head_dim, kernels::DType dtype) {
  return static_cast<size_t>(num_pages) * 2 * static_cast<size_t>(head_dim) *
         kernels::DTypeBytes(kernels::DerivedKeyType(dtype));
}

KeySummary SummarizeKeys(const PagePool& pool, int32_t stream, int32_t first_page, std::span<const int32_t> pages) {
  SPLICE_CHECK(pool.host_memory(), "keys that the host can read");
  const kernels::KvPoolView& view = pool.view().rank(0);
  KeySummary summary{stream, first_page, static_cast<int32_t>(pages.size()), {}};
  summary.keys.resize(KeySummaryBytes(summary.num_pages, view.head_dim, view.dtype));
  const size_t bytes = KeySummaryBytes(1, view.head_dim, view.dtype);
  std::vector<double> sums(view.head_dim);
  for (size_t i = 0; i < pages.size(); ++i)
    SummarizePage(pool.view().k(pages[i]), view.dtype, sums, summary.keys.data() + i * bytes);
  return summary;
}

double LogMassBelow(const KeySummary& summary, kernels::DType dtype, std::span<const float> q, float sm_scale) {
  const double rounding = dtype == kernels::DType::kF32 ? 0x1p-20 : 0x1p-8;
  const kernels::DType derived = kernels::DerivedKeyType(dtype);
  const size_t dim = q.size();
  const size_t bytes = KeySummaryBytes(1, static_cast<int32_t>(dim), dtype);
  const double log_others = std::log(kKeys - 1.0);
  double most = -std::numeric_limits<double>::infinity(), sum = 0;  // exp(most) * sum is the result so far
  const auto add = [&](double score) {
    if (score > most) {
      sum = sum * std::exp(most - score) + 1;
      most = score;
    } else {
      sum += std::exp(score - most);
    }
  };
  for (int32_t page = 0; page < summary.num_pages; ++page) {
    const std::byte* keys = summary.keys.data() + static_cast<size_t>(page) * bytes;
    double apart = 0, mean = 0, size = 0;
    for (size_t c = 0; c < dim; ++c) {
      apart += double{q[c]} * kernels::LoadElement(keys, derived, static_cast<int64_t>(c));
      const double product = double{q[c]} * kernels::LoadElement(keys, derived, static_cast<int64_t>(dim + c));
      mean += product;
      size += std::abs(product);
    }
    add(sm_scale * apart);
    add(sm_scale * (mean - rounding * size) + log_others);
  }
  return sum > 0 ? most + std::log(sum) : -std::numeric_limits<double>::infinity();
}

float ShareOutside(double log_mass, float lse_seen) {
  if (std::isinf(log_mass) && log_mass < 0) return 0;
  return static_cast<float>(1 / (1 + std::exp(double{lse_seen} - log_mass)));
}

}  // namespace spl::engine
