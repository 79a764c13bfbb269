#include "services/router/dispatch/attempt.h"

#include <algorithm>

#include "services/router/request/wire.h"

namespace spl::router {
namespace {

using Clock = std::chrono::steady_clock;

void AddTokensToPrefill(const SentRequest& sent, const Attempt& attempt,
                        google::protobuf::RepeatedField<uint32_t>& tokens) {
  tokens.Add(sent.prompt.tokens.begin(), sent.prompt.tokens.end());
  const auto prior = sent.output.first(attempt.NumPriorOutput(sent.output));
  tokens.Add(prior.begin(), prior.end());
}

void DescribeConversation(const SentRequest& sent, v1::Conversation& out) {
  const chunk::Digest owner = sent.namespace_keys.DeriveOwner(sent.request.caller);
  out.set_name(sent.request.session);
  out.set_owner(owner.data(), owner.size());
  out.set_namespace_key(sent.prompt.namespace_key.data(), sent.prompt.namespace_key.size());
  for (const chunk::ChunkKey& key : sent.prompt.keys.prefix)
    out.mutable_chunk_keys()->append(key.bytes.begin(), key.bytes.end());
}

// If it fails the worker is gone, or the ticket expires there.
void SendRelease(DecodeWorker& worker, const v1::Ticket& ticket, const char* reason, bool writer_quiet,
                 std::chrono::milliseconds timeout) {
  using Call = UnaryCall<v1::ReleaseRequest, v1::ReleaseResponse>;
  auto call = std::make_shared<Call>();
  call->request.set_ticket_id(ticket.ticket_id());
  call->request.set_generation(ticket.generation());
  call->request.set_reason(reason);
  call->request.set_writer_quiet(writer_quiet);
  Call::Start(call, worker, &v1::Decode::Stub::async_interface::Release, Clock::now() + timeout,
              [](const absl::Status&, Call&) {});
}

// The cancelled prefill call may not have arrived yet, or its writes may outlive it: only the worker's word says that
// nothing is written now or later.
void AskWriter(const Attempt& attempt, const char* reason, const DispatchOptions& options) {
  using Call = UnaryCall<v1::RevokeTicketRequest, v1::RevokeTicketResponse>;
  auto call = std::make_shared<Call>();
  call->request.set_ticket_id(attempt.ticket.ticket_id());
  call->request.set_epoch(attempt.prefill.epoch);
  call->request.set_ttl_ms(attempt.ticket.ttl_ms());
  Call::Start(call, *attempt.prefill.worker, &v1::Prefill::Stub::async_interface::RevokeTicket,
              Clock::now() + options.revoke_timeout,
              [decode = attempt.decode.worker, ticket = attempt.ticket, reason, timeout = options.release_timeout](
                  const absl::Status& status, Call&) {
                if (status.ok()) SendRelease(*decode, ticket, reason, true, timeout);
              });
}

}  // namespace

void FillReserveRequest(const SentRequest& sent, const Attempt& attempt, const FleetSnapshot& fleet,
                        const DispatchOptions& options, v1::ReserveRequest& out) {
  constexpr double kTtlMsMax = 86'400e3;  // a day: workers allow less
  const size_t num_prior = attempt.NumPriorOutput(sent.output);
  out.set_request_id(sent.request.request_id);
  out.set_prompt_tokens(static_cast<uint32_t>(sent.prompt.tokens.size() + num_prior));
  *out.mutable_sampling() = ToProto(sent.request.sampling);
  *out.mutable_reuse() = sent.request.reuse;
  out.set_model_fingerprint(fleet.model.fingerprint.data(), fleet.model.fingerprint.size());
  out.set_ttl_ms(
      static_cast<uint32_t>(std::min(kTtlMsMax, static_cast<double>(options.ticket_ttl.count()) +
                                                    1e3 * options.ticket_ttl_per_expected * attempt.expected_seconds)));
  out.set_num_output_tokens(static_cast<uint32_t>(num_prior));
  if (attempt.decode.replays) out.mutable_replay_token_ids()->Add(sent.output.begin(), sent.output.end());
  if (sent.request.sampling.HasPenalty() || DecodeReadsPrompt(sent.request.reuse) || num_prior > 0)
    AddTokensToPrefill(sent, attempt, *out.mutable_token_ids());
  out.set_kv_bytes_per_s(attempt.link.bytes_per_s);
  out.set_kv_write_seconds(attempt.link.write_s);
  *out.mutable_writer() = attempt.link.writer;
  if (!ConversationOf(sent.request, sent.prompt, sent.namespace_keys).empty())
    DescribeConversation(sent, *out.mutable_conversation());
}

void FillPrefillRequest(const SentRequest& sent, const Attempt& attempt, v1::PrefillRequest& out) {
  const GenerationRequest& request = sent.request;
  const RequestPrompt& prompt = sent.prompt;
  out.set_request_id(request.request_id);
  AddTokensToPrefill(sent, attempt, *out.mutable_token_ids());
  *out.mutable_sampling() = ToProto(request.sampling);
  *out.mutable_reuse() = request.reuse;
  out.set_choose_method(request.choose_method);
  out.set_namespace_key(prompt.namespace_key.data(), prompt.namespace_key.size());
  for (size_t i = 0; i < prompt.segments.size(); ++i) {
    v1::TokenSegment& segment = *out.add_segments();
    segment.set_begin(prompt.segments[i].begin);
    segment.set_end(prompt.segments[i].end);
    segment.set_frozen(prompt.segments[i].frozen);
    const SegmentNamespace& space = prompt.namespaces[i];
    segment.set_namespace_key(space.key.data(), space.key.size());
    segment.set_shared(space.shared);
  }
  if (!request.session.empty()) {
    out.set_session(request.session);
    const chunk::Digest owner = sent.namespace_keys.DeriveOwner(request.caller);
    out.set_session_owner(owner.data(), owner.size());
  }
  *out.mutable_ticket() = attempt.ticket;
  out.set_num_output_tokens(static_cast<uint32_t>(attempt.NumPriorOutput(sent.output)));
  // They come with the first token: a request that continues elsewhere has them.
  if (request.prompt_logprobs.has_value() && sent.output.empty()) out.set_prompt_logprobs(*request.prompt_logprobs);
}

void ReleaseTicket(Attempt& attempt, const char* reason, const DispatchOptions& options) {
  if (!attempt.reserved) return;
  attempt.reserved = false;
  SendRelease(*attempt.decode.worker, attempt.ticket, reason, attempt.writer_quiet, options.release_timeout);
  if (!attempt.writer_quiet) AskWriter(attempt, reason, options);
}

}  // namespace spl::router
