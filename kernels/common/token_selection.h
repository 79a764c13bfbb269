// Shared by decode steps that attend to chosen tokens only: the lists, a sequence's inputs to the choice, and the
// action of each of its layers in a step (SparCas, Quest: docs/methods/sparcas.md and docs/methods/baselines.md).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/hot_rows.h"

namespace spl::kernels {

inline constexpr int32_t kSelectBudgetMax = 1 << 16;
inline constexpr int32_t kBoundTokens = 16;  // positions per granule, the unit of Quest's bounds

// One list of positions for each head stream of a decode batch, stream = sequence * num_kv_heads + KV head. Device
// memory, borrowed.
struct TokenLists {
  int32_t* tokens = nullptr;  // [num_streams, stride]: the first counts[stream] are positions, ascending, none twice
  int32_t* counts = nullptr;  // [num_streams], each at most stride
  int64_t stride = 0;         // elements

  std::span<const int32_t> of(int64_t stream) const {  // host memory only
    return {tokens + stream * stride, static_cast<size_t>(counts[stream])};
  }
};

// The action of one layer of a sequence in a decode step.
struct LayerSelection {
  bool selects = false;  // false: its streams are left alone (no list, no compact keys)
  bool refresh = false;  // choose dimensions anew and gather what changed
  bool first = false;    // with refresh: nothing has been gathered yet
  // A stream has two tables of dimensions. `parity` names the valid one, which is read. A refresh writes the other one,
  // which the next step names: blocks that still read the old choice then do not race with the one that writes the new.
  uint8_t parity = 0;       // 0 or 1
  int32_t compact_len = 0;  // candidates [0, compact_len) are in the compact pages already; at most all of them
  bool records = false;     // keeps the queries of this step for later choices (query_window.h)
  // True: the streams hold only their listed positions and those written after the list; these are their candidates
  // (candidates.h). Without `selects` a stream's list is the first num_sinks and the last `window` candidates. A
  // window of 0 means all candidates.
  bool listed = false;
  int32_t num_sinks = 0;
  int32_t window = 0;
};

// A sequence of a decode batch in one layer, as the operations that choose tokens see it. Borrowed for the call.
struct SelectingSequence {
  std::span<const std::span<const int32_t>> page_tables;  // [num_kv_heads]; pages of K and V, see attention.h
  // [num_kv_heads]: compact pages, from the same pool. A head without compact pages does not select and gets no list.
  // May be empty for operations that need none (TopTokens).
  std::span<const std::span<const int32_t>> compact_tables;
  int32_t kv_len = 0;  // positions [0, kv_len) have been written
  LayerSelection step;
  int32_t budget = 0;       // tokens per list, at most TokenLists::stride
  int32_t recent = 1;       // part of the budget: the last positions, always taken; in [1, budget]
  int32_t* dims = nullptr;  // device [num_kv_heads, 2, num_dims] of this layer: the two tables of each stream
  // For a listed step: [num_kv_heads] pages with the listed positions, all of them before first_fresh.
  std::span<const std::span<const int32_t>> list_tables = {};
  int32_t first_fresh = 0;
  // From the layer's first stream on. With a hot buffer, pages that are in host memory may be kNoPage in page_tables.
  HotRows hot = {};

  bool selects(int32_t kv_head) const {
    return step.selects && (compact_tables.empty() || !compact_tables[static_cast<size_t>(kv_head)].empty());
  }
};

// Limit of the different ways ("plans") in which the sequences of one step may choose. An operation is called once per
// plan, over the whole batch, and leaves the sequences of other plans alone.
inline constexpr int32_t kSelectionPlansMax = 8;

// A sequence's selection for all layers, as Session::Stage brings it to a device.
struct SequenceSelection {
  // [num_layers * heads_in_tables()] lists of compact pages, layer by layer. Under one kv_id they only grow, and an
  // empty one stays empty. In each list_pages from list_begin on are its SelectingSequence::list_tables, and those
  // behind them its SelectingSequence::compact_tables.
  std::span<const std::vector<int32_t>> compact_tables;
  std::span<const LayerSelection> layers;  // [num_layers]
  int32_t budget = 0;
  int32_t recent = 1;
  int32_t* dims = nullptr;  // device [num_layers, num_kv_heads, 2, num_dims]
  int32_t list_begin = 0;
  int32_t list_pages = 0;
  int32_t first_fresh = 0;
  int32_t plan = 0;  // in [0, kSelectionPlansMax): the `plan` of the operations that serve it
  HotRows hot = {};  // all layers
  // Another choice of the same sequence, with the same tables, in front of this one: the tokens that it keeps are the
  // candidates of this one. Operations serve it where their arguments say so (QueryWindowArgs::outer). Null: none.
  const SequenceSelection* outer = nullptr;
};

}  // namespace spl::kernels
