// A row of a decode step: one token of one sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "services/engine/cache/compact_pages.h"
#include "services/engine/cache/hot_buffer.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/selection/token_selector.h"

namespace spl::engine {

// Measures how much of a step's attention lies on the tokens that its selector chose: the same queries attend once
// more, to everything.
struct MassProbe {
  TokenSelector* everything = nullptr;  // BeginStep was called for this step
  // Out, [num_layers, num_qo_heads of the model]: exp(lse of the chosen tokens - lse of everything), 0 to 1. The caller
  // sizes it. -1: the head saw everything.
  std::vector<float> kept;
};

struct DecodeRow {
  int32_t token = 0;
  const SequenceKv* kv = nullptr;
  TokenSelector* selector = nullptr;
  // Has room for position kv->num_tokens(). Null if the selector needs none (MakeCompactPages).
  const CompactPages* compact = nullptr;
  // Costs a second attention, two waits and two small copies in each layer, and the step is not recorded. The step's
  // results are the same. Null: not measured.
  MassProbe* mass = nullptr;
  // The step estimates the same, and Executor::BeginMass reads it back. It costs next to nothing. Only of rows that
  // choose by packed keys.
  bool estimates = false;
  // Position of the token. A sequence may have several rows, at consecutive positions: each sees the ones before it, as
  // if it had been a step of its own. -1: the position after the last one that the sequence has.
  int64_t at = -1;
  // Row of the executor's last BeginSample whose token is used instead of `token`. The host need not have seen it yet.
  // -1: `token` is used.
  int32_t token_of = -1;
  // The sequence's pages in host memory. Null: all of its pages are in the pool.
  const HotBuffer* hot = nullptr;

  int64_t position() const { return at < 0 ? kv->num_tokens() : at; }
  // Positions that the sequence has after the step has written this one.
  int64_t kv_len() const { return position() + 1; }
};

// Whether the row may share a pass with slices of prompts (chunked prefill): it attends to all that the model lets it
// see, nothing is measured, and it needs neither the host during its pass nor another pass for the same step.
inline bool CanRide(const DecodeRow& row) {
  return row.selector->is_exact() && row.mass == nullptr && row.kv->is_whole();
}

}  // namespace spl::engine
