// The choice of positions by weight, on the host: shared by SelectTokens and TopTokens.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace spl::kernels {

// Bits whose unsigned order is the order of the scores; NaN is lowest, -0 equals +0.
inline uint32_t OrderedBits(float score) {
  if (score != score) return 0;
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The same for weights, which are not negative; NaN counts as 0.
inline uint32_t WeightBits(float weight) { return weight > 0 ? std::bit_cast<uint32_t>(weight) : 0; }

// Writes the indices of the `k` chosen of [0, n) to out, ascending: the last `forced`, and of the others those with the
// largest ordered bits; ties go to the lower index. 0 <= forced <= k <= n. Linear in n; `bits` [n].
void ChooseLargest(std::span<const uint32_t> bits, int64_t k, int64_t forced, int32_t* out);

}  // namespace spl::kernels
