// Requests to a prefill engine and their results: prompts (Submit) and contexts to store (Publish).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/base/trace.h"
#include "services/chunk/chunk.h"
#include "services/engine/cache/kept_tokens.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/methods/method_choice.h"
#include "services/engine/model/position_ranges.h"
#include "services/engine/recovery/reuse_options.h"
#include "services/engine/runtime/chunk_publisher.h"
#include "services/engine/runtime/final_pages.h"
#include "services/engine/runtime/prefill_stats.h"
#include "services/engine/runtime/sampler.h"

namespace spl::engine {

using CancelFlag = std::shared_ptr<std::atomic<bool>>;

// `pages` of every KV head of `layer` are final after `fence`, except pages without a token of `kept`: the contents of
// those are undefined, and they must not be sent. `kv` keeps the pages alive.
struct LayerReady {
  std::shared_ptr<const SequenceKv> kv;
  int32_t layer = 0;
  PageRanges pages;                             // not empty
  std::shared_ptr<const kernels::Fence> fence;  // wait for it before reading the pages; null: they are written
  std::shared_ptr<const KeptTokens> kept;       // as PrefillOutcome::kept; null: everything
  bool early = false;  // final before the prompt's next pass: what passes of any prompt write may be sent first
};

struct PrefillOutcome {
  std::vector<SampledToken> first_tokens;  // one per fork; empty unless OK
  std::shared_ptr<const SequenceKv> kv;    // keeps the pages until they are sent; null if none were allocated
  PrefillStats stats;
  std::vector<float> first_logits;  // [vocab_size] after the prompt; empty unless asked for
  // [prompt tokens - 1] of the token at each position but the first, behind those before it; empty unless asked for.
  std::vector<TokenLogprob> prompt_logprobs;
  // Local heads that were restored to full visibility: layer * num_kv_heads + head, ascending.
  std::vector<int32_t> restored_heads;
  std::shared_ptr<const KeptTokens> kept;  // the prompt's tokens that decoding may use; null: all
  // Positions of a shorter prompt, if a method dropped the others: `kv` holds these, moved together. Empty: the whole
  // prompt.
  PositionRanges only;
};

// A part of a prompt that may be found in the segment index, and is offered to it.
struct ReuseSpan {
  PositionRange range;
  chunk::Digest namespace_key{};
  bool frozen = false;  // part of a knowledge base: its local source is evicted after ordinary ones
  // Callers share the namespace. The segment's source must have been computed by itself, so that it holds nothing of
  // another caller's text.
  bool shared = false;
};

struct PrefillRequest {
  std::string id;
  std::vector<int32_t> tokens;
  int64_t num_output_tokens = 0;  // end of `tokens` that was generated earlier (a resumed continuation)
  SamplingParams sampling;
  // Policy "" or "auto": chosen when it is known what there is to copy.
  ReuseOptions reuse;
  MethodTerms terms;
  chunk::Digest namespace_key{};
  std::string session;              // the conversation that this is a turn of (SessionTable); empty: none
  chunk::Digest session_owner{};    // the caller (SessionId)
  std::vector<ReuseSpan> segments;  // ascending, disjoint
  // Also looks for text outside of `segments`, under namespace_key.
  bool reuse_auto = false;
  bool publish = true;      // false: nothing of it is kept for later prompts, here or in the store
  bool background = false;  // low priority: runs after all requests that are not
  // Most tokens without KV: a prompt with more ends with ResourceExhausted before it is computed. 0: no limit.
  int64_t max_computed_tokens = 0;
  // It goes on in the decode engine of the same pool as soon as on_done says so: the next step waits a moment for it.
  bool continues_here = false;
  int64_t max_cached_tokens = INT64_MAX;  // leading tokens whose KV may be taken from earlier prompts
  bool return_first_logits = false;
  // Log-probabilities of the prompt's tokens, and so many alternatives for each. The whole prompt is computed then, and
  // no cached KV is used, as its rows are gone. InvalidArgument: another policy than exact, or more than
  // kMaxPromptLogprobs in all.
  std::optional<int32_t> prompt_logprobs;
  TraceContext fetch_trace;  // for calls to the store (CurrentTrace)
  SteadyTime deadline = SteadyTime::max();
  CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
  // Callbacks; they must not block. They run on the engine thread, or on a thread of its executor while the engine
  // waits for it. on_layer runs once for each page of each layer, as soon as the page is final: for cached pages before
  // anything is computed, for copies that will not be computed afresh as soon as that is known, for the rest with its
  // slice. So pages of a layer may come in any order. on_done runs exactly once and last, also after an error. The
  // indexes have the prompt's KV a moment after it, and before the next prompt begins.
  std::function<void(const LayerReady&)> on_layer;
  // A pass may call on_layer for so many layers together, behind the fence of the last one: a fence holds the device up
  // for some 10 us.
  int32_t layers_a_fence = 1;
  std::function<void(absl::Status, PrefillOutcome)> on_done;
};

struct PublishOutcome {
  PublishTally stored;  // also after an error: acknowledged chunks stay stored
  PrefillStats stats;
};

// A context to be computed exactly so that its segments can be stored: documents of a knowledge base.
struct PublishRequest {
  std::string id;
  std::vector<int32_t> tokens;
  std::vector<ReuseSpan> segments;  // the parts to store; at least one, ascending, disjoint
  chunk::PutOptions put;            // pin and durability of the stored chunks
  SteadyTime deadline = SteadyTime::max();
  CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
  // Runs exactly once, on the engine thread or a thread of its publisher. Must not block.
  std::function<void(absl::Status, const PublishOutcome&)> on_done;
};

}  // namespace spl::engine
