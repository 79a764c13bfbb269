#include <cmath>

#include "kernels/fill/fill.h"

namespace spl::kernels::ref {
namespace {

// A double that f16 holds exactly, nonzero: |x| in [2^-24, 65504].
uint16_t ToHalf(double x) {
  if (x == 0) return 0;
  const uint16_t sign = x < 0 ? 0x8000 : 0;
  int exponent = 0;
  const double mantissa = std::frexp(std::abs(x), &exponent);  // [0.5, 1)
  if (exponent < -13) return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::ldexp(std::abs(x), 24)));
  const auto fraction = static_cast<uint16_t>(std::ldexp(mantissa, 11)) & 0x3ffu;
  return static_cast<uint16_t>(sign | (exponent + 14) << 10 | fraction);
}

}  // namespace

absl::Status FillRandom(const KernelContext&, const FillRandomArgs& a) {
  if (absl::Status s = ValidateFillRandom(a); !s.ok()) return s;
  for (int64_t i = 0; i < a.count; ++i) {
    const double x = std::ldexp(RandomStep(a.stream, static_cast<uint64_t>(a.index(i))), a.step_exponent);
    switch (a.dtype) {
      case DType::kF32:
        static_cast<float*>(a.out)[i] = static_cast<float>(x);
        break;
      case DType::kBF16:
        static_cast<bf16*>(a.out)[i] = ToBf16(static_cast<float>(x));
        break;
      case DType::kF16:
        static_cast<uint16_t*>(a.out)[i] = ToHalf(x);
        break;
      case DType::kE4M3:
      case DType::kInt4:
        break;  // refused above
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels::ref
