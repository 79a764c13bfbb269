#include <algorithm>
#include <cmath>

#include "kernels/common/e4m3.h"
#include "kernels/quantize/quantize_rows.h"

namespace spl::kernels::ref {
namespace {

// By trying every code: the nearest one, of two the even one.
uint8_t NearestCode(float x) {
  if (std::isnan(x)) return 0x7f;
  uint8_t best = 0;
  for (int code = 0; code < 0x7f; ++code) {
    const auto candidate = static_cast<uint8_t>(code);
    const double off = std::abs(double{kE4M3Values[candidate]} - std::abs(double{x})),
                 best_off = std::abs(double{kE4M3Values[best]} - std::abs(double{x}));
    if (off < best_off || (off == best_off && code % 2 == 0)) best = candidate;
  }
  return static_cast<uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

}  // namespace

absl::Status QuantizeRows(const KernelContext&, const QuantizeRowsArgs& a) {
  if (absl::Status s = ValidateQuantizeRows(a); !s.ok()) return s;
  auto* const codes = static_cast<uint8_t*>(a.out.data);
  const int64_t group = a.out.scale_group == 0 ? a.width : a.out.scale_group;
  for (int64_t i = 0; i < a.num_rows; ++i) {
    for (int64_t begin = 0; begin < a.width; begin += group) {
      const int64_t end = std::min(begin + group, a.width);
      float max = 0;
      for (int64_t j = begin; j < end; ++j) max = std::max(max, std::abs(a.x[i * a.width + j]));
      const bool zero = max < 0x1p-100f;
      a.out.scales[begin / group * E4M3Rows(a.num_rows) + i] = zero ? 1 : max / kE4M3Max;
      for (int64_t j = begin; j < end; ++j)
        codes[i * a.width + j] = NearestCode(a.x[i * a.width + j] * (zero ? 0 : kE4M3Max / max));
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
