// Requests to a decode engine, and the tokens that it answers with.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/engine/cache/compact_pages.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/runtime/head_restorer.h"
#include "services/engine/runtime/prefill_request.h"
#include "services/engine/runtime/sampler.h"
#include "services/engine/selection/decode_options.h"

namespace spl::engine {

struct DecodeToken {
  int32_t fork = 0;
  SampledToken token;
};

// A prefilled sequence. The first token of every fork was sampled by the prefill side and is not streamed again.
struct DecodeRequest {
  std::string id;
  std::unique_ptr<SequenceKv>
      kv;  // positions [0, num_tokens) of the prompt, or what its head classes or kept tokens leave
  SamplingParams sampling;
  DecodeOptions decode;
  // Room for what the selector keeps beside the KV, or at least as much for one of the same method
  // (MakeSelectorBehind); null: it is made when decoding begins.
  std::unique_ptr<CompactPages> compact;
  std::vector<int32_t> prompt;             // only read when sampling.needs_prompt(), or by a selector of_prompt()
  std::vector<int32_t> left_prompt;        // what `kv` has of it, where that is less (PrefillOutcome::only); else empty
  std::vector<int32_t> prior_output;       // tail of the prompt that was generated earlier
  std::vector<SampledToken> first_tokens;  // one per fork
  // Tokens of an answer that began elsewhere, from its first one on: they are run through decode steps, and what comes
  // behind them is streamed. So the KV is what it would be had the answer begun here. first_tokens and prior_output are
  // empty then, and there is one fork. Empty: the answer begins here.
  std::vector<int32_t> replay;
  SteadyTime deadline = SteadyTime::max();
  CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
  // Who has what the holes of `kv` leave out; null: nobody, or nobody is asked. Needs the selector head_classes.
  std::shared_ptr<HeadSource> heads;
  HeadRestoreOptions restore;
  // Runs on the engine thread when the sequence joins the batch, before its first step; must not block. May be null.
  std::function<void()> on_start;
  // Run one at a time on the thread that delivers the tokens of all sequences (TokenDelivery): steps go on meanwhile,
  // and one that takes long holds up those of other sequences. on_tokens with the tokens of one step, in the order of
  // steps. on_restore with the sums so far, when they have changed and before the tokens that they concern; may be
  // null. on_done exactly once and last; the pages are free before it runs. May call the engine, but not Stop.
  std::function<void(const HeadRestoreReport&)> on_restore;
  std::function<void(std::span<const DecodeToken>)> on_tokens;
  std::function<void(absl::Status)> on_done;
};

}  // namespace spl::engine
