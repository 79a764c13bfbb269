#include "kernels/selection/token_choice.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

namespace spl::kernels {
namespace {

constexpr int kDigitBits = 11;
constexpr int kShift = 32 - kDigitBits;

}  // namespace

// A histogram of the leading digit tells in which one the k-th largest is; only scores with that digit are sorted.
void ChooseLargest(std::span<const uint32_t> bits, int64_t k, int64_t forced, int32_t* out) {
  const int64_t free = static_cast<int64_t>(bits.size()) - forced;
  int64_t left = k - forced;
  if (left > 0) {
    // Four counters a digit: neighbours have like scores, and one counter would wait for its own last addition.
    thread_local std::vector<uint32_t> counts, candidates;
    counts.assign(size_t{4} << kDigitBits, 0);
    for (int64_t i = 0; i < free; ++i) ++counts[(bits[static_cast<size_t>(i)] >> kShift) * 4 + (i & 3)];
    uint32_t digit = 1u << kDigitBits;
    int64_t in_digit = 0;
    for (int64_t above = 0; above + in_digit < left;) {
      above += in_digit;
      --digit;
      const uint32_t* c = &counts[size_t{digit} * 4];
      in_digit = int64_t{c[0]} + c[1] + c[2] + c[3];
      if (above + in_digit >= left) {
        left -= above;
        break;
      }
    }
    // Indices with this digit or a larger one, without a branch: which they are follows no pattern.
    thread_local std::vector<int32_t> indices;
    indices.resize(static_cast<size_t>(free) + 1);
    size_t n = 0;
    for (int64_t i = 0; i < free; ++i) {
      indices[n] = static_cast<int32_t>(i);
      n += (bits[static_cast<size_t>(i)] >> kShift) >= digit ? 1 : 0;
    }
    candidates.clear();
    for (size_t i = 0; i < n; ++i) {
      const uint32_t value = bits[static_cast<size_t>(indices[i])];
      if ((value >> kShift) == digit) candidates.push_back(value);
    }
    const auto kth = candidates.begin() + (left - 1);
    std::nth_element(candidates.begin(), kth, candidates.end(), std::greater<>());
    const uint32_t threshold = *kth;
    int64_t ties =
        left - std::count_if(candidates.begin(), candidates.end(), [&](uint32_t value) { return value > threshold; });
    int32_t* to = out;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t value = bits[static_cast<size_t>(indices[i])];
      if (value > threshold || (value == threshold && ties-- > 0)) *to++ = indices[i];
    }
  }
  std::iota(out + (k - forced), out + k, static_cast<int32_t>(free));
}

}  // namespace spl::kernels
