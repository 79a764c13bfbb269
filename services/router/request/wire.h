// Converts plain structs to protobuf messages and back. Besides the gRPC handlers, only this file knows both.
#pragma once

#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/request/request.h"
#include "spl/v1/common.pb.h"
#include "spl/v1/decode.pb.h"
#include "spl/v1/prefill.pb.h"

namespace spl::router {

v1::SamplingParams ToProto(const Sampling& sampling);
// `defaults`: values for optional fields that are unset.
Sampling FromProto(const v1::SamplingParams& params, const Sampling& defaults = {});

v1::FinishReason ToProto(FinishReason reason);
FinishReason FromProto(v1::FinishReason reason);

v1::TokenLogprob LogprobToProto(const OutputToken& token);
// Takes over the id and log-probabilities of a worker's token (v1::SampledToken).
template <typename SampledToken>
OutputToken TokenFromProto(const SampledToken& sampled) {
  OutputToken token;
  token.id = static_cast<TokenId>(sampled.token_id());
  if (!sampled.has_logprob()) return token;
  token.has_logprob = true;
  token.logprob = sampled.logprob().logprob();
  for (const auto& candidate : sampled.logprob().top()) {
    token.top.emplace_back(static_cast<TokenId>(candidate.token_id()), candidate.logprob());
  }
  return token;
}
// The prompt's tokens with what a prefill worker says of them. FailedPrecondition: it does not say it of every token
// but the first.
absl::StatusOr<std::vector<OutputToken>> PromptFromProto(std::span<const TokenId> prompt,
                                                         const v1::PromptLogprobs& logprobs);

}  // namespace spl::router
