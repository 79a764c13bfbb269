#include "services/router/request/wire.h"

#include "services/base/status.h"
#include "services/wire/structured_output.h"

namespace spl::router {

v1::SamplingParams ToProto(const Sampling& s) {
  v1::SamplingParams out;
  if (s.max_tokens.has_value()) out.set_max_tokens(*s.max_tokens);
  out.set_min_tokens(s.min_tokens);
  out.set_temperature(s.temperature);
  out.set_top_k(s.top_k);
  out.set_top_p(s.top_p);
  out.set_min_p(s.min_p);
  out.set_repetition_penalty(s.repetition_penalty);
  out.set_presence_penalty(s.presence_penalty);
  out.set_frequency_penalty(s.frequency_penalty);
  if (s.seed.has_value()) out.set_seed(*s.seed);
  for (const auto& [id, bias] : s.logit_bias) (*out.mutable_logit_bias())[id] = bias;
  out.mutable_stop_token_ids()->Add(s.stop_token_ids.begin(), s.stop_token_ids.end());
  out.set_ignore_eos(s.ignore_eos);
  out.set_n(s.n);
  if (s.logprobs.has_value()) out.set_logprobs(*s.logprobs);
  if (s.structured_output.has_value()) wire::SetGrammarSpec(*s.structured_output, out);
  return out;
}

Sampling FromProto(const v1::SamplingParams& p, const Sampling& defaults) {
  Sampling out = defaults;
  if (p.has_max_tokens()) out.max_tokens = p.max_tokens();
  out.min_tokens = p.min_tokens();
  if (p.has_temperature()) out.temperature = p.temperature();
  if (p.has_top_k()) out.top_k = p.top_k();
  if (p.has_top_p()) out.top_p = p.top_p();
  if (p.has_min_p()) out.min_p = p.min_p();
  if (p.has_repetition_penalty()) out.repetition_penalty = p.repetition_penalty();
  out.presence_penalty = p.presence_penalty();
  out.frequency_penalty = p.frequency_penalty();
  if (p.has_seed()) out.seed = p.seed();
  for (const auto& [id, bias] : p.logit_bias()) out.logit_bias[id] = bias;
  out.stop_token_ids.assign(p.stop_token_ids().begin(), p.stop_token_ids().end());
  out.ignore_eos = p.ignore_eos();
  out.n = p.n() == 0 ? 1 : p.n();
  if (p.has_logprobs()) out.logprobs = p.logprobs();
  out.structured_output = wire::GrammarSpecOf(p);
  if (out.structured_output.has_value()) out.structured_field = "sampling.structured_output";
  return out;
}

v1::FinishReason ToProto(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return v1::FINISH_REASON_UNSPECIFIED;
    case FinishReason::kStop:
      return v1::FINISH_REASON_STOP;
    case FinishReason::kLength:
      return v1::FINISH_REASON_LENGTH;
    case FinishReason::kCancelled:
      return v1::FINISH_REASON_CANCELLED;
    case FinishReason::kError:
      return v1::FINISH_REASON_ERROR;
  }
  return v1::FINISH_REASON_ERROR;
}

FinishReason FromProto(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_UNSPECIFIED:
      return FinishReason::kNone;
    case v1::FINISH_REASON_STOP:
      return FinishReason::kStop;
    case v1::FINISH_REASON_LENGTH:
      return FinishReason::kLength;
    case v1::FINISH_REASON_CANCELLED:
      return FinishReason::kCancelled;
    default:
      return FinishReason::kError;  // also what a newer worker may know and this router does not
  }
}

v1::TokenLogprob LogprobToProto(const OutputToken& token) {
  v1::TokenLogprob out;
  out.set_logprob(token.logprob);
  for (const auto& [id, logprob] : token.top) {
    v1::TokenLogprob::Candidate* candidate = out.add_top();
    candidate->set_token_id(static_cast<uint32_t>(id));
    candidate->set_logprob(logprob);
  }
  return out;
}

absl::StatusOr<std::vector<OutputToken>> PromptFromProto(std::span<const TokenId> prompt,
                                                         const v1::PromptLogprobs& logprobs) {
  const size_t num_top = logprobs.num_top();
  const size_t num_told = logprobs.logprobs().size();
  if (num_told + 1 != prompt.size() || logprobs.top_ids_size() != logprobs.top_logprobs_size() ||
      static_cast<size_t>(logprobs.top_ids_size()) != num_told * num_top)
    return Errorf(
        absl::StatusCode::kFailedPrecondition,
        "log-probabilities of {} tokens and {} alternatives for a prompt of {} tokens: a worker of an earlier "
        "version does not compute them, upgrade it",
        num_told, logprobs.top_ids_size(), prompt.size());
  std::vector<OutputToken> tokens(prompt.size());
  for (size_t i = 0; i < prompt.size(); ++i) {
    OutputToken& token = tokens[i];
    token.id = prompt[i];
    if (i == 0) continue;
    token.has_logprob = true;
    token.logprob = logprobs.logprobs(static_cast<int>(i - 1));
    for (size_t j = (i - 1) * num_top; j < i * num_top; ++j)
      token.top.emplace_back(static_cast<TokenId>(logprobs.top_ids(static_cast<int>(j))),
                             logprobs.top_logprobs(static_cast<int>(j)));
  }
  return tokens;
}

}  // namespace spl::router
