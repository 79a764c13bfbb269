// The answer to one request so far: its continuations, from sampled token ids to text.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "services/router/request/continuation.h"
#include "services/router/request/request.h"
#include "services/router/telemetry/router_metrics.h"
#include "spl/v1/decode.pb.h"

namespace spl::router {

// One thread at a time. Borrows the tokenizer and the metrics, where it counts tokens and how continuations end.
class Answer {
 public:
  explicit Answer(RouterMetrics& metrics) : metrics_(metrics) {}

  // Once: sampling.n empty continuations. `model_vocab_size` as Continuation takes it.
  void Begin(const tokenizer::Tokenizer& tokenizer, const GenerationRequest& request, uint32_t model_vocab_size);

  // Appends a token to continuation `index`, and the text that may be shown to its delta in `deltas`, which is added if
  // it is missing. A token after the end of its continuation is ignored. Internal: the index or the id does not exist,
  // or the worker gave the continuation up.
  absl::Status Take(uint32_t index, const v1::SampledToken& sampled, std::vector<Delta>* deltas);

  size_t num_continuations() const { return continuations_.size(); }
  bool finished() const;                               // all continuations are
  bool stopped_by_string() const;                      // one did: the decode worker does not know that it has ended
  uint32_t num_tokens() const { return num_tokens_; }  // over all continuations
  // Token ids from which another decode worker continues; empty with several continuations, which cannot move.
  const std::vector<TokenId>& tokens() const { return tokens_; }

 private:
  RouterMetrics& metrics_;
  std::vector<std::unique_ptr<Continuation>> continuations_;
  std::vector<TokenId> tokens_;
  uint32_t num_tokens_ = 0;
};

}  // namespace spl::router
