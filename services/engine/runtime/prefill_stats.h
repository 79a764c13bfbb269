// Origin of a prompt's KV in a prefill engine, and the time it took.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "services/engine/execution/line_attention.h"
#include "services/engine/methods/method_choice.h"
#include "services/engine/runtime/fetch_cost.h"

namespace spl::engine {

using SteadyTime = std::chrono::steady_clock::time_point;

// Copied tokens by the text that their KV was computed behind (CopyContext).
struct CopiedTokens {
  int64_t same_context = 0, isolated = 0, foreign = 0;
};

// Recomputed tokens of copies, each by the first of its reasons.
struct RecomputedTokens {
  int64_t links = 0;       // first tokens of segments
  int64_t beside_new = 0;  // next to text that is new
  int64_t tail = 0;        // the end of a prompt that ends with a copy
  int64_t chosen = 0;      // all others: scores chose them
};

// Units are tokens. prompt = cached + aligned + computed.
struct PrefillStats {
  std::string policy;
  bool exact = false;  // the KV equals that of a plain prefill
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;        // leading tokens with KV: from local pages, the chunk store or the conversation
  int64_t session_tokens = 0;       // those of them from the last turn of the conversation
  int64_t stored_tokens = 0;        // those of cached_tokens from the chunk store
  int64_t aligned_tokens = 0;       // copies of segments, rotated to their new positions
  CopiedTokens copied;              // aligned_tokens, by context
  int64_t recomputed_tokens = 0;    // those of them that were recomputed in the layers above the dense ones
  RecomputedTokens recomputed_for;  // recomputed_tokens, by reason
  MethodChoice choice;
  int32_t dense_layers = 0;     // first layers in which every row ran, to choose these; 0: none, or a probe chose
  int32_t probe_layers = 0;     // layers in which fresh text alone chose these; 0: other layers, or nothing chose
  int64_t computed_tokens = 0;  // neither cached nor aligned
  int64_t fetched_bytes = 0;
  StoreUse store_use = StoreUse::kNone;
  int64_t skipped_tokens = 0;      // computed although the store has them: store_use says why
  double store_s = 0;              // the store's time for fetched_bytes; the prompt may have been computed meanwhile
  int64_t restored_heads = 0;      // local heads that got full visibility back
  double ffn_share = 1;            // share of rows times layers that ran through feed-forward
  double kept_share = 1;           // share of aligned tokens times layers that the policy keeps
  int64_t summaries_computed = 0;  // segments whose summary no earlier prompt had computed (PromptRun)
  LineReport lines;                // for loopserve and minference; heads == 0: no lines were chosen
  // Times do not overlap. Their sum is the time from Submit to the end of the last slice. queue: waiting for pages, a
  // fetch thread and the engine. lookup: searching for KV in this worker. fetch: held back for
  // chunks from the store.
  // prefill: computing, including slices of other prompts in between.
  double queue_s = 0, lookup_s = 0, fetch_s = 0, prefill_s = 0;
  // Start of each: waiting, lookup, fetch (epoch: there was none), computing.
  SteadyTime submitted{}, looked_up{}, fetched{}, started{};
};

}  // namespace spl::engine
