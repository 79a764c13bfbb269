// Requests to a decode engine, and the tokens of its answers.
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
#include "services/engine/runtime/decode_choice.h"
#include "services/engine/runtime/prefill_request.h"
#include "services/engine/runtime/sampler.h"
#include "services/engine/selection/decode_options.h"

namespace spl::engine {

struct DecodeToken {
  int32_t fork = 0;
  SampledToken token;
  StepChoice step;
};

// A sequence whose prompt is prefilled. The prefill side has sampled the first token of every fork; it is not streamed
// again.
struct DecodeRequest {
  std::string id;
  std::unique_ptr<SequenceKv>
      kv;  // positions [0, num_tokens) of the prompt, or those that head classes or kept tokens leave
  SamplingParams sampling;
  DecodeOptions decode;
  // Memory for the selector's data beside the KV, or more of it for a selector of the same method (MakeSelectorBehind).
  // Null: it is allocated when decoding begins.
  std::unique_ptr<CompactPages> compact;
  std::vector<int32_t> prompt;        // read only if sampling.needs_prompt(), or by a selector of_prompt()
  std::vector<int32_t> left_prompt;   // tokens in `kv`, if a method dropped some (PrefillOutcome::only); else empty
  std::vector<int32_t> prior_output;  // end of the prompt that was generated earlier
  std::vector<SampledToken> first_tokens;  // one per fork
  // Tokens of an answer that began on another worker, from its first one on. They run through decode steps, and only
  // later tokens are streamed. The KV is then the same as if the answer had begun here. first_tokens and prior_output
  // must be empty, and there is one fork. Empty: the answer begins here.
  std::vector<int32_t> replay;
  SteadyTime deadline = SteadyTime::max();
  CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
  // Runs on the engine thread when the sequence joins the batch, before its first step. Must not block. May be null.
  std::function<void()> on_start;
  // Runs on the engine thread before the first continuation gives its pages back, at most once: the caller may share
  // full pages. Not called for a sequence that has no pages then (preempted), or has moved some to host memory. Must not
  // block. May be null.
  std::function<void(const SequenceKv&)> on_pages_back;
  // Callbacks. They run one at a time on the thread that delivers the tokens of all sequences (TokenDelivery). Steps
  // continue meanwhile, but a slow callback delays those of other sequences. They may call the engine, but not Stop.
  // on_tokens: the tokens of one step, in the order of steps.
  // on_done: exactly once and last; the pages are free before it runs.
  std::function<void(std::span<const DecodeToken>)> on_tokens;
  std::function<void(absl::Status)> on_done;
};

}  // namespace spl::engine
