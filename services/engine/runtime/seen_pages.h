// Pages of a prompt that a stage sees, if these are not all (PrefillStage::unseen), as a sequence of their own. Rows
// are placed, and attend, by their slots in it; they are turned by their positions in the text.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "services/engine/cache/sequence_kv.h"
#include "services/engine/execution/executor.h"
#include "services/engine/model/position_ranges.h"

namespace spl::engine {

// One thread at a time.
class SeenPages {
 public:
  // Shares the pages of `kv`, which has room for `num_tokens`. `unseen`: whole pages, not all. Cost: one visit of every
  // page that is seen.
  SeenPages(const SequenceKv& kv, std::span<const PositionRange> unseen, int32_t num_tokens);

  // The slots of these positions. REQUIRES: all of them are seen.
  PositionRanges SlotsOf(std::span<const PositionRange> positions) const;
  // Makes a slice of the prompt one of what is seen. It borrows from this object until the next call.
  void Place(PrefillSlice& slice);

 private:
  const PositionRanges seen_;
  SequenceKv kv_;
  std::vector<int32_t> slots_;
};

}  // namespace spl::engine
