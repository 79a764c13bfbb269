#include <array>
#include <bit>

#include "kernels/common/parallel.h"
#include "kernels/fill/fill.h"

namespace spl::kernels::cpu {
namespace {

constexpr int32_t kStepMax = 140;

// f16 bits of an integer times 2^exponent, for values that f16 holds exactly.
uint16_t HalfBits(int32_t step, int32_t exponent) {
  if (step == 0) return 0;
  const uint16_t sign = step < 0 ? 0x8000 : 0;
  const auto magnitude = static_cast<uint32_t>(step < 0 ? -step : step);
  const int top = std::bit_width(magnitude) - 1;  // magnitude = 1.fraction · 2^top
  const int biased = top + exponent + 15;
  if (biased < 1) return static_cast<uint16_t>(sign | magnitude << (exponent + 24));  // subnormal, in units of 2^-24
  return static_cast<uint16_t>(sign | biased << 10 | ((magnitude << (10 - top)) & 0x3ffu));
}

// The generator is a chain of three 64-bit multiplications an element and takes 2 ns; there are only 281 results, so
// that their 16-bit forms come from a table.
void Fill16(const FillRandomArgs& a, const std::array<uint16_t, 2 * kStepMax + 1>& bits, int64_t begin, int64_t end) {
  auto* out = static_cast<uint16_t*>(a.out);
  for (int64_t i = begin; i < end; ++i)
    out[i] = bits[static_cast<size_t>(RandomStep(a.stream, static_cast<uint64_t>(a.index(i))) + kStepMax)];
}

void Fill32(const FillRandomArgs& a, float step, int64_t begin, int64_t end) {
  auto* out = static_cast<float*>(a.out);
  for (int64_t i = begin; i < end; ++i)
    out[i] = static_cast<float>(RandomStep(a.stream, static_cast<uint64_t>(a.index(i)))) * step;
}

}  // namespace

absl::Status FillRandom(const KernelContext& ctx, const FillRandomArgs& a) {
  if (absl::Status s = ValidateFillRandom(a); !s.ok()) return s;
  const float step = std::bit_cast<float>(static_cast<uint32_t>(127 + a.step_exponent) << 23);
  std::array<uint16_t, 2 * kStepMax + 1> bits;
  for (int32_t s = -kStepMax; s <= kStepMax; ++s) {
    bits[static_cast<size_t>(s + kStepMax)] =
        a.dtype == DType::kBF16 ? ToBf16(static_cast<float>(s) * step).bits : HalfBits(s, a.step_exponent);
  }
  ParallelRows(ctx, a.count, int64_t{16} << 10, [&](int64_t begin, int64_t end) {
    if (a.dtype == DType::kF32) {
      Fill32(a, step, begin, end);
    } else {
      Fill16(a, bits, begin, end);
    }
  });
  return absl::OkStatus();
}

}  // namespace spl::kernels::cpu
