// How a prefill engine came by the KV of one prompt, and how long that took.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "services/engine/execution/line_attention.h"

namespace spl::engine {

using SteadyTime = std::chrono::steady_clock::time_point;

// Tokens: prompt = cached + aligned + computed.
struct PrefillStats {
  std::string policy;
  bool exact = false;  // whether the KV is that of a plain prefill
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;      // leading tokens that had KV: local pages, chunk store or the conversation's own
  int64_t session_tokens = 0;     // of these, from the last turn of the conversation
  int64_t stored_tokens = 0;      // of these, from the chunk store
  int64_t aligned_tokens = 0;     // copies of segments, turned to their new positions
  int64_t recomputed_tokens = 0;  // of these, computed afresh in the layers above the dense ones
  int64_t computed_tokens = 0;    // neither cached nor aligned
  int64_t fetched_bytes = 0;
  int64_t restored_heads = 0;      // local heads that saw everything again
  double ffn_share = 1;            // of rows times layers, what ran through feed-forward
  double kept_share = 1;           // of the aligned tokens times layers, what the policy keeps
  int64_t summaries_computed = 0;  // segments whose summary no earlier prompt had left (PromptRun)
  LineReport lines;                // of loopserve and minference; without heads: no lines were chosen
  // Disjoint; together all of the time from Submit until the last slice is done: waiting for pages, a fetch thread and
  // the engine; looking for KV here; bringing chunks from the store; computing, slices of other prompts in between.
  double queue_s = 0, lookup_s = 0, fetch_s = 0, prefill_s = 0;
  // When they began: the wait, the lookup, the fetch (epoch: there was none), computing.
  SteadyTime submitted{}, looked_up{}, fetched{}, started{};
};

}  // namespace spl::engine
