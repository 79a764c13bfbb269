#include "services/router/dispatch/request_prompt.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <string>
#include <utility>

#include "services/base/status.h"
#include "services/methods/methods.h"
#include "services/methods/quality.h"
#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

SegmentNamespace NamespaceOf(const TokenSegment& segment, const GenerationRequest& request,
                             const NamespaceKeys& namespace_keys) {
  SegmentNamespace space;
  if (segment.namespace_key.size() == space.key.size()) {
    std::copy(segment.namespace_key.begin(), segment.namespace_key.end(), space.key.begin());
    return space;
  }
  const std::string& name = segment.namespace_name.empty() ? request.namespace_name : segment.namespace_name;
  return {namespace_keys.Derive(request.caller, name), NamespaceKeys::IsPublic(name)};
}

PromptKeys MakeKeys(const RequestPrompt& prompt, const FleetSnapshot& fleet) {
  PromptKeys keys;
  if (!fleet.model.known) return keys;
  keys.prefix = chunk::MakePrefixKeys(fleet.model.fingerprint, prompt.namespace_key, prompt.tokens);
  for (size_t i = 0; i < prompt.segments.size(); ++i) {
    const TokenSegment& s = prompt.segments[i];
    const auto tokens = std::span(prompt.tokens).subspan(s.begin, s.end - s.begin);
    std::vector<chunk::ChunkKey> chunks = MakeSegmentKeys(fleet.model.fingerprint, prompt.namespaces[i].key, tokens);
    if (chunks.empty()) continue;
    const chunk::ChunkKey last = chunks.back();
    keys.segments.push_back({.key = last, .begin = s.begin, .end = s.end, .chunks = std::move(chunks)});
  }
  return keys;
}

absl::Status CheckTokenIds(const Sampling& sampling, uint32_t vocab_size) {
  for (const uint32_t id : sampling.stop_token_ids) {
    if (id >= vocab_size) return ParamError("stop_token_ids", "{} is not one of the {} token ids", id, vocab_size);
  }
  for (const auto& [id, bias] : sampling.logit_bias) {
    if (id >= vocab_size) return ParamError("logit_bias", "{} is not one of the {} token ids", id, vocab_size);
  }
  return absl::OkStatus();
}

const char* PromptField(const Prompt& prompt) {
  return std::holds_alternative<ChatPrompt>(prompt) ? "messages" : "prompt";
}

}  // namespace

std::string ConversationOf(const GenerationRequest& request, const RequestPrompt& prompt,
                           const NamespaceKeys& namespace_keys) {
  if (request.session.empty() || request.reuse.policy() != methods::kExact || request.reuse.lines().head_classes() ||
      prompt.keys.prefix.empty())
    return "";
  const chunk::Digest owner = namespace_keys.DeriveOwner(request.caller);
  std::string conversation(owner.begin(), owner.end());
  conversation.append(prompt.namespace_key.begin(), prompt.namespace_key.end());
  return conversation + request.session;
}

absl::StatusOr<RequestPrompt> PreparePrompt(GenerationRequest& request, const ServedModel& model,
                                            const NamespaceKeys& namespace_keys, const FleetSnapshot& fleet) {
  SPLICE_RETURN_IF_ERROR(ValidateRequest(request));
  SPLICE_RETURN_IF_ERROR(model.CheckName(request.model));
  SPLICE_ASSIGN_OR_RETURN(TokenizedPrompt tokenized, model.Tokenize(request.prompt, request.add_special_tokens));
  if (NamespaceKeys::IsPublic(request.namespace_name)) request.reuse.set_auto_segments(false);
  RequestPrompt prompt{.tokens = std::move(tokenized.ids),
                       .segments = std::move(tokenized.segments),
                       .namespace_key = namespace_keys.Derive(request.caller, request.namespace_name)};
  for (const TokenSegment& segment : prompt.segments)
    prompt.namespaces.push_back(NamespaceOf(segment, request, namespace_keys));
  prompt.keys = MakeKeys(prompt, fleet);
  return prompt;
}

void ResolvePolicy(GenerationRequest& request, RequestPrompt& prompt, const FleetSnapshot& fleet,
                   const QualityRecords& records) {
  const std::string_view asked = methods::PolicyOf(request.reuse.policy(), request.reuse.quality());
  const bool reuses = !prompt.segments.empty() || request.reuse.auto_segments();
  const double contract = methods::ParseQuality(request.reuse.quality()).value_or(methods::Quality()).agreement;
  request.choose_method = methods::IsAuto(asked);
  const std::string_view best = methods::BestUnder(contract, fleet.model.DefaultReuse(prompt.tokens.size()));
  request.reuse.set_policy(std::string(methods::ResolvePolicy(asked, reuses, best)));
  const methods::Policy* const policy = methods::FindPolicy(request.reuse.policy());
  // The worker will compute it exactly, and windows would leave out what exact decodes from.
  const bool bad = request.choose_method &&
                   records.IsClearlyBad(prompt.namespace_key, request.reuse.policy(), std::chrono::steady_clock::now());
  if ((contract > 0 || bad) && policy != nullptr && policy->head_classes != methods::HeadClasses::kNever)
    request.reuse.mutable_heads()->set_full_kv(true);
  if (!methods::ReusesSegments(request.reuse.policy())) prompt.keys.segments.clear();
  // No cached KV is used, wherever it is.
  if (request.prompt_logprobs.has_value()) prompt.keys = {};
}

absl::Status CheckAndClamp(GenerationRequest& request, const RequestPrompt& prompt, const FleetSnapshot& fleet,
                           uint64_t context, uint32_t tokenizer_vocab_size) {
  const std::string field = PromptField(request.prompt);
  const uint64_t num_tokens = prompt.tokens.size();
  if (num_tokens == 0) return ParamError(field, "has no tokens");
  if (request.prompt_logprobs.has_value() && request.reuse.policy() != methods::kExact)
    return ParamError(request.echo && request.sampling.logprobs.has_value() ? "echo" : "prompt_logprobs",
                      "log-probabilities of prompts are those of exact prefill, and the request's reuse is \"{}\": set "
                      "its reuse to \"exact\"",
                      request.reuse.policy());
  const auto too_long = [&](const char* what, uint64_t room) {
    return SetErrorCode(
        ParamError(field, "the prompt has {} tokens, but {} {} tokens, the output included", num_tokens, what, room),
        "context_length_exceeded");
  };
  if (num_tokens + 1 > context) return too_long("the model's context is", context);
  uint64_t prefill_room = 0;
  for (const PrefillView& p : fleet.prefill) {
    prefill_room = std::max(prefill_room, p.max_prompt_tokens == 0 ? context : p.max_prompt_tokens);
  }
  if (!fleet.prefill.empty() && num_tokens > prefill_room) return too_long("a prefill worker holds", prefill_room);
  uint64_t decode_room = fleet.decode.empty() ? context : 0;
  for (const DecodeView& d : fleet.decode) {
    decode_room = std::max(decode_room, d.max_sequence_tokens == 0 ? context : d.max_sequence_tokens);
  }
  if (num_tokens + 1 > decode_room) return too_long("a decode worker holds", decode_room);
  const auto room = static_cast<uint32_t>(std::min(context, decode_room) - num_tokens);
  Sampling& sampling = request.sampling;
  sampling.max_tokens = std::min(sampling.max_tokens.value_or(room), room);
  sampling.min_tokens = std::min(sampling.min_tokens, *sampling.max_tokens);
  return CheckTokenIds(sampling, fleet.model.known ? fleet.model.vocab_size : tokenizer_vocab_size);
}

}  // namespace spl::router
