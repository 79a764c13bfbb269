// Checks of sequences with a hot buffer that RefillHotRows and AttendHotRows share.
#pragma once

#include "absl/status/status.h"
#include "kernels/common/status.h"
#include "kernels/common/token_selection.h"

namespace spl::kernels {

// Checks the sizes of the hot buffer of a sequence that selects; without one there is nothing to check.
inline absl::Status ValidateHotBuffer(const char* op, const SelectingSequence& s, const TokenLists& lists) {
  if (!s.step.selects || !s.hot.any()) return absl::OkStatus();
  if (s.hot.num_slots % kPageTokens != 0 || s.hot.num_slots > kHotSlotsMax)
    return InvalidCall(op, ": a hot buffer of ", s.hot.num_slots, " slots; it takes a multiple of ", kPageTokens,
                       ", at most ", kHotSlotsMax);
  if (s.budget > s.hot.num_slots || s.budget > kHotBudgetMax || s.budget > lists.stride)
    return InvalidCall(op, ": budget ", s.budget, " for a hot buffer of ", s.hot.num_slots, " slots and lists of ",
                       lists.stride, "; at most ", kHotBudgetMax);
  if (s.hot.host_pages == nullptr || s.hot.slot_pages == nullptr || s.hot.slot_of == nullptr ||
      s.hot.position_of == nullptr || s.hot.listed_at == nullptr || s.hot.counts == nullptr)
    return InvalidCall(op, ": a table of the hot buffer is null");
  if ((s.kv_len + kPageTokens - 1) / kPageTokens > s.hot.max_pages)
    return InvalidCall(op, ": kv_len ", s.kv_len, " for tables of ", s.hot.max_pages, " pages");
  if (s.step.listed) return InvalidCall(op, ": a sequence that holds listed positions only");
  return absl::OkStatus();
}

}  // namespace spl::kernels
