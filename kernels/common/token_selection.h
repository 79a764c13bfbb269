// What decode steps that attend to chosen tokens only share: the lists, what a sequence brings to choose with, and what
// each of its layers does in a step (SparCas, Quest: docs/methods/sparcas.md and docs/methods/baselines.md).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spl::kernels {

inline constexpr int32_t kSelectBudgetMax = 1 << 16;
inline constexpr int32_t kBoundTokens = 16;  // positions of a granule, which Quest's bounds are of

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

// What one layer of a sequence does in a decode step.
struct LayerSelection {
  bool selects = false;  // otherwise its streams are left alone: no list, no compact keys
  bool refresh = false;  // choose dimensions anew and gather what changed
  bool first = false;    // with refresh: nothing has been gathered yet
  // Of the two tables of dimensions of a stream the valid one is read; a refresh writes the other one, which the next
  // step names. Two, so that blocks which still read the old choice do not race with the one that writes the new.
  uint8_t parity = 0;       // 0 or 1
  int32_t compact_len = 0;  // candidates [0, compact_len) are in the compact pages already; at most all
  bool records = false;     // the queries of this step are kept for later choices (query_window.h)
  // The streams only hold what is listed for them, and what was written behind that: their candidates (candidates.h).
  // Without `selects` a stream's list is the first num_sinks and the last `window` candidates, with a window of 0 all.
  bool listed = false;
  int32_t num_sinks = 0;
  int32_t window = 0;
};

// A sequence of a decode batch in one layer, as the operations that choose tokens see it. Borrowed for the call.
struct SelectingSequence {
  std::span<const std::span<const int32_t>> page_tables;  // [num_kv_heads]; pages of K and V, see attention.h
  // [num_kv_heads]; compact pages, out of the same pool. A head without any does not select: it gets
  // no list. Where an operation needs none (TopTokens), all of them may be left out.
  std::span<const std::span<const int32_t>> compact_tables;
  int32_t kv_len = 0;  // positions [0, kv_len) have been written
  LayerSelection step;
  int32_t budget = 0;       // tokens of a list, at most TokenLists::stride
  int32_t recent = 1;       // of these the last positions, always taken; in [1, budget]
  int32_t* dims = nullptr;  // device [num_kv_heads, 2, num_dims] of this layer: the two tables of each stream
  // Of a step that is listed: [num_kv_heads] pages with the listed positions, all in front of first_fresh.
  std::span<const std::span<const int32_t>> list_tables = {};
  int32_t first_fresh = 0;

  bool selects(int32_t kv_head) const {
    return step.selects && (compact_tables.empty() || !compact_tables[static_cast<size_t>(kv_head)].empty());
  }
};

// Sequences of one step may choose in this many different ways: operations are called once for each way, over the
// whole batch, and leave the sequences of the other plans alone.
inline constexpr int32_t kSelectionPlansMax = 8;

// The same for all layers of a sequence, as Session::Stage brings it to a device.
struct SequenceSelection {
  // [num_layers * heads_in_tables()] lists of compact pages, layer by layer. Under one kv_id they only ever grow, and
  // one that is empty stays so. The first list_pages of each are its SelectingSequence::list_tables.
  std::span<const std::vector<int32_t>> compact_tables;
  std::span<const LayerSelection> layers;  // [num_layers]
  int32_t budget = 0;
  int32_t recent = 1;
  int32_t* dims = nullptr;  // device [num_layers, num_kv_heads, 2, num_dims]
  int32_t list_pages = 0;
  int32_t first_fresh = 0;
  int32_t plan = 0;  // in [0, kSelectionPlansMax): the `plan` of the operations that serve it
};

}  // namespace spl::kernels
