// K and V of a sequence that chooses tokens, with its finished pages in host memory: tables that say where a position
// is (docs/decisions/0019-host-tier.md). Recent pages stay in the pool. A hot buffer of each stream, in pages of the
// pool, holds copies of the rows that recent steps have listed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/kv_pool.h"

namespace spl::kernels {

inline constexpr int32_t kHotSlotsMax = 1 << 15;   // slots of a stream's hot buffer
inline constexpr int32_t kHotBudgetMax = 1 << 14;  // tokens of a list of a sequence with a hot buffer
inline constexpr int32_t kHotAgeMax = 255;         // listings that are as long ago as this, or longer, count as equal

// One stream of a sequence. Borrowed device memory.
struct HotStream {
  int32_t num_slots = 0;
  const std::byte* const* host_pages = nullptr;  // [max_pages]: page i in host memory; null: it is in the page table
  // [num_slots / 64]: pages of the pool in which the slots lie, counted from the first page of the view
  const int32_t* slot_pages = nullptr;
  uint16_t* slot_of = nullptr;     // [64 max_pages]: 1 + slot with a copy of the position; 0: there is none
  int32_t* position_of = nullptr;  // [num_slots]: 1 + position of which the slot has a copy; 0: the slot is free
  int32_t* listed_at = nullptr;    // [num_slots]: kv_len of the last step that listed it; 0: none did

  constexpr bool on_host(int32_t position) const { return host_pages[position / kPageTokens] != nullptr; }
  // Row of a position whose page is on the host and that has a slot: as `page * 64 + row of the page`.
  constexpr int64_t RowOf(int32_t position) const {
    const int32_t slot = slot_of[position] - 1;
    return int64_t{slot_pages[slot / kPageTokens]} * kPageTokens + slot % kPageTokens;
  }
};

// All streams of a sequence that one rank has, [num_layers, num_kv_heads]. Borrowed device memory, whose address never
// changes while the sequence lives. num_slots 0: the sequence has no hot buffer; the rest is null then.
struct HotRows {
  int32_t num_slots = 0;  // slots a stream: a multiple of 64, at least the budget, at most kHotSlotsMax
  int32_t max_pages = 0;  // most pages of a stream
  const std::byte* const* host_pages = nullptr;  // [num_streams, max_pages]; see HotStream, here and below
  const int32_t* slot_pages = nullptr;           // [num_streams, num_slots / 64]
  uint16_t* slot_of = nullptr;                   // [num_streams, 64 max_pages]
  int32_t* position_of = nullptr;                // [num_streams, num_slots]
  int32_t* listed_at = nullptr;                  // [num_streams, num_slots]
  uint64_t* counts = nullptr;                    // [2]: listed rows of host pages, and those of them that were copied

  constexpr bool any() const { return num_slots > 0; }
  constexpr HotStream stream(int64_t n) const {
    return {num_slots,
            host_pages + n * max_pages,
            slot_pages + n * (num_slots / kPageTokens),
            slot_of + n * max_pages * kPageTokens,
            position_of + n * num_slots,
            listed_at + n * num_slots};
  }
  // The same from stream `n` on.
  constexpr HotRows from(int64_t n) const {
    const HotStream first = stream(n);
    return {num_slots,     max_pages,         first.host_pages, first.slot_pages,
            first.slot_of, first.position_of, first.listed_at,  counts};
  }
};

}  // namespace spl::kernels
