#include "services/router/dispatch/answer.h"

#include <algorithm>

#include "services/base/status.h"
#include "services/router/request/wire.h"

namespace spl::router {

void Answer::Begin(const tokenizer::Tokenizer& tokenizer, const GenerationRequest& request, uint32_t model_vocab_size) {
  for (uint32_t i = 0; i < request.sampling.n; ++i)
    continuations_.push_back(std::make_unique<Continuation>(tokenizer, request, model_vocab_size));
}

absl::Status Answer::Take(uint32_t index, const v1::SampledToken& sampled, std::vector<Delta>* deltas) {
  if (index >= continuations_.size()) {
    return Errorf(absl::StatusCode::kInternal, "a worker sent a token of continuation {} of {}", index,
                  continuations_.size());
  }
  Continuation& continuation = *continuations_[index];
  if (continuation.finished()) return absl::OkStatus();
  const FinishReason reason = FromProto(sampled.finish_reason());
  if (reason == FinishReason::kError)
    return absl::InvalidArgumentError(
        "the answer could not be held to its grammar any further: a token took longer than a grammar may take. Make "
        "the "
        "schema, expression or grammar simpler");
  if (reason == FinishReason::kCancelled) {
    return Errorf(absl::StatusCode::kInternal, "the decode worker ended the request: {}", FinishReasonName(reason));
  }
  ++num_tokens_;
  metrics_.generation_tokens.Increment();
  if (continuations_.size() == 1) tokens_.push_back(static_cast<TokenId>(sampled.token_id()));
  auto delta = std::find_if(deltas->begin(), deltas->end(), [&](const Delta& d) { return d.index == index; });
  if (delta == deltas->end()) {
    deltas->push_back({.index = index});
    delta = std::prev(deltas->end());
  }
  SPLICE_RETURN_IF_ERROR(continuation.Append(TokenFromProto(sampled), reason, &*delta));
  if (delta->finish_reason == FinishReason::kStop) metrics_.finished_stop.Increment();
  if (delta->finish_reason == FinishReason::kLength) metrics_.finished_length.Increment();
  return absl::OkStatus();
}

bool Answer::finished() const {
  return std::all_of(continuations_.begin(), continuations_.end(), [](const auto& c) { return c->finished(); });
}

bool Answer::stopped_by_string() const {
  return std::any_of(continuations_.begin(), continuations_.end(),
                     [](const auto& c) { return c->stopped_by_string(); });
}

}  // namespace spl::router
