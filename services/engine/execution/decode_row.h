// The one row that a sequence has in a decode step.
#pragma once

#include <cstdint>
#include <vector>

#include "services/engine/cache/compact_pages.h"
#include "services/engine/cache/key_summary.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/selection/token_selector.h"

namespace spl::engine {

// How much of a step's attention lies, at least, on keys that are only known by their summaries (key_summary.h).
struct HeadProbe {
  // By stream, layer * num_kv_heads + head of the model; null: is not asked. A stream that is asked is local where the
  // model itself lets it see everything, and its summary covers nothing that it sees.
  std::vector<const KeySummary*> summaries;
  std::vector<float> outside;  // out, by stream: e-, the largest of the query heads of the KV head
};

// How much of a step's attention lies on what its selector chose: the same queries over everything, beside it.
struct MassProbe {
  TokenSelector* everything = nullptr;  // BeginStep was called for this step
  // Out, [num_layers, num_qo_heads of the model]: exp(lse of what is chosen - lse of everything), 0 to 1; -1 where the
  // head saw everything. Sized by the caller.
  std::vector<float> kept;
};

struct DecodeRow {
  int32_t token = 0;
  const SequenceKv* kv = nullptr;
  TokenSelector* selector = nullptr;
  // Room for position kv->num_tokens(); null where the selector needs none (MakeCompactPages).
  const CompactPages* compact = nullptr;
  HeadProbe* probe = nullptr;  // null: nothing is asked. REQUIRES: host memory; as many outside as summaries
  // Null: not measured. Costs a second attention, two waits and two small copies in each layer, and the step is not
  // recorded; what the step computes is the same.
  MassProbe* mass = nullptr;
  // Where the token stands; -1: behind all that the sequence has. A sequence may have several rows, at positions one
  // behind the other: each sees those in front of it, as if it had been a step of its own.
  int64_t at = -1;
  // The row of the executor's last BeginSample whose token comes here, in the place of `token`: the host need not have
  // seen it. -1: `token` is the token.
  int32_t token_of = -1;

  int64_t position() const { return at < 0 ? kv->num_tokens() : at; }
  // Positions that the sequence has once the step has written this one.
  int64_t kv_len() const { return position() + 1; }
};

// Whether nothing of the row needs the host during its pass, or other passes for the same step: it attends to all that
// the model lets it see, and nothing is measured. It may share a pass with slices of prompts.
inline bool CanRide(const DecodeRow& row) {
  return row.selector->is_exact() && row.compact == nullptr && row.probe == nullptr && row.mass == nullptr &&
         row.kv->is_whole();
}

}  // namespace spl::engine
