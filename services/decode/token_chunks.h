// Turns the tokens of a sequence into messages of its stream, and tells operators about the decode method `adaptive`:
// by what costs it decides, and which of its tokens came from steps that chose.
#pragma once

#include <span>

#include "services/base/metrics.h"
#include "services/engine/runtime/decode_choice.h"
#include "services/engine/runtime/decode_request.h"
#include "services/engine/selection/step_costs.h"
#include "spl/v1/decode.pb.h"

namespace spl::decode {

// Any thread may call.
class TokenChunks {
 public:
  // Logs the costs, one line for each length, unless they are the built-in rule.
  TokenChunks(const engine::StepCosts& costs, Metrics& metrics);

  // Adds the tokens to the sequence's counts. The message has their sums, if the method is `adaptive`.
  v1::StreamChunk Of(std::span<const engine::DecodeToken> tokens, engine::DecodeChoiceCounter& counts) const;

 private:
  prometheus::Counter& dense_;
  prometheus::Counter& chosen_;
  prometheus::Counter& guarded_;
};

}  // namespace spl::decode
