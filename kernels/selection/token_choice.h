// The choice of positions by weight that SelectTokens and TopTokens share on the host.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace spl::kernels {

// Unsigned order = order of the scores, NaN lowest, -0 equal to +0.
inline uint32_t OrderedBits(float score) {
  if (score != score) return 0;
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Unsigned order = order of weights, which are not negative; NaN is 0.
inline uint32_t WeightBits(float weight) { return weight > 0 ? std::bit_cast<uint32_t>(weight) : 0; }

// Writes the indices of the `k` chosen of [0, n) to out, ascending: the last `forced`, and of the others those with the
// largest ordered bits, ties to the lower index. 0 <= forced <= k <= n. Linear in n; `bits` [n].
void ChooseLargest(std::span<const uint32_t> bits, int64_t k, int64_t forced, int32_t* out);

}  // namespace spl::kernels
