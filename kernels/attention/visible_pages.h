// A visibility rule in the form that kernels walk: the pages that may hold something visible, and the slots of a page
// that a row sees. For kLines it covers whole tiles only, for rows of one row tile at a time. The kernel handles the
// single columns itself: walking their pages would cost what the rule saves.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "kernels/common/kv_pool.h"
#include "kernels/common/visibility.h"

namespace spl::kernels {

class VisiblePages {
 public:
  static constexpr int32_t kNone = std::numeric_limits<int32_t>::max();

  explicit VisiblePages(const HeadVisibility& v) : v_(v) {}

  // Returns the first logical page >= `page` that a row at a position in [low, high] may see, or kNone.
  int32_t Next(int32_t page, int32_t low, int32_t high) const {
    switch (v_.rule) {
      case VisibilityRule::kFull:
        break;
      case VisibilityRule::kBand:
        if (int64_t{page} * kPageTokens >= v_.num_sinks) page = std::max(page, FirstWindowPage(low));
        break;
      case VisibilityRule::kList:
      case VisibilityRule::kSelected:  // the caller has turned it into a list
        page = NextListed(page);
        break;
      case VisibilityRule::kElsewhere:
        return kNone;
      case VisibilityRule::kLines:
        page = NextTile(page, low, high);
        break;
    }
    return page <= high / kPageTokens && high >= 0 ? page : kNone;
  }

  // Bit j: a row at `position` sees slot j of the page. `page` came from Next.
  uint64_t Slots(int32_t page, int32_t position) const {
    const int64_t base = int64_t{page} * kPageTokens;
    const uint64_t causal = Below(int64_t{position} + 1 - base);
    switch (v_.rule) {
      case VisibilityRule::kFull:
        return causal;
      case VisibilityRule::kBand:
        return causal & (Below(v_.num_sinks - base) | ~Below(int64_t{position} - v_.window + 1 - base));
      case VisibilityRule::kList:
      case VisibilityRule::kSelected:
        return causal & Listed(base);
      case VisibilityRule::kElsewhere:
        return 0;
      case VisibilityRule::kLines:
        return Tiles(position)[page / 64] >> (page % 64) & 1 ? causal : 0;
    }
    return 0;
  }

 private:
  // Bits [0, n).
  static uint64_t Below(int64_t n) {
    if (n <= 0) return 0;
    return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
  }

  int32_t FirstWindowPage(int32_t position) const {
    return static_cast<int32_t>(std::max<int64_t>(int64_t{position} - v_.window + 1, 0) / kPageTokens);
  }

  int32_t NextListed(int32_t page) const {
    const auto it = std::lower_bound(v_.indices.begin(), v_.indices.end(), int64_t{page} * kPageTokens);
    return it == v_.indices.end() ? kNone : *it / kPageTokens;
  }

  const uint64_t* Tiles(int32_t position) const {
    return v_.lines->tiles + int64_t{(position - v_.lines->first_position) / 64} * v_.lines->tile_words;
  }

  int32_t NextTile(int32_t page, int32_t low, int32_t high) const {
    const uint64_t* tiles = Tiles(low);
    for (int32_t word = page / 64; word * 64 <= high / kPageTokens; ++word) {
      const uint64_t bits = tiles[word] & (word == page / 64 ? ~uint64_t{0} << (page % 64) : ~uint64_t{0});
      if (bits != 0) return word * 64 + std::countr_zero(bits);
    }
    return kNone;
  }

  uint64_t Listed(int64_t base) const {
    uint64_t bits = 0;
    for (auto it = std::lower_bound(v_.indices.begin(), v_.indices.end(), base);
         it != v_.indices.end() && *it < base + kPageTokens; ++it) {
      bits |= uint64_t{1} << (*it - base);
    }
    return bits;
  }

  const HeadVisibility& v_;
};

}  // namespace spl::kernels
