#include "services/engine/runtime/seen_pages.h"

#include "services/base/check.h"

namespace spl::engine {

SeenPages::SeenPages(const SequenceKv& kv, std::span<const PositionRange> unseen, int32_t num_tokens)
    : seen_(ComplementOf(unseen, {0, num_tokens})), kv_(kv.pool(), kv.shape()) {
  constexpr int32_t kPage = kernels::kPageTokens;
  for (const PositionRange& range : seen_) {
    SPLICE_CHECK(range.begin % kPage == 0 && (range.end % kPage == 0 || range.end == num_tokens), "whole pages");
    kv_.AppendPlaces(kv, range.begin / kPage, PagesFor(range.end));
  }
}

PositionRanges SeenPages::SlotsOf(std::span<const PositionRange> positions) const {
  SPLICE_CHECK(CountOf(IntersectionOf(positions, seen_)) == CountOf(positions), "positions that are seen");
  return NumberedWithin(positions, seen_);
}

void SeenPages::Place(PrefillSlice& slice) {
  slots_.clear();
  for (const PositionRange& range : SlotsOf(RangesOf(slice.positions))) {
    for (int32_t slot = range.begin; slot < range.end; ++slot) slots_.push_back(slot);
  }
  slice.angles = slice.positions;
  slice.positions = slots_;
  slice.kv = &kv_;
}

}  // namespace spl::engine
