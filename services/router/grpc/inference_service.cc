#include "services/router/grpc/inference_service.h"

#include <memory>
#include <utility>

#include "services/base/grpc_status.h"
#include "services/router/dispatch/generation.h"
#include "services/router/grpc/generate_reactor.h"
#include "services/router/grpc/prompt_from_proto.h"
#include "services/router/grpc/proto_names.h"
#include "services/router/request/api_error.h"
#include "services/router/request/echo_text.h"
#include "services/router/request/wire.h"

namespace spl::router {
namespace {

absl::Status PoolFull() {
  return SetRetryAfterMs(Errorf(absl::StatusCode::kResourceExhausted, "too many requests wait to be read"), 1000);
}

}  // namespace

absl::StatusOr<GenerationRequest> FromProto(const v1::GenerateRequest& request, const Sampling& defaults) {
  GenerationRequest out;
  out.api = "grpc";
  out.request_id = request.request_id();
  out.model = request.model();
  SPLICE_ASSIGN_OR_RETURN(out.prompt, FromProto(request.prompt()));
  out.sampling = FromProto(request.sampling(), defaults);
  out.stop.assign(request.stop().begin(), request.stop().end());
  out.echo = request.echo();
  if (out.echo && std::holds_alternative<ChatPrompt>(out.prompt))
    return ParamError("echo", "is served for prompts of text, parts or tokens, and this one is a chat");
  std::optional<uint32_t> prompt_logprobs;
  if (request.has_prompt_logprobs()) prompt_logprobs = request.prompt_logprobs();
  AskPromptLogprobs(prompt_logprobs, out);
  out.reuse = request.reuse();
  out.namespace_name = request.namespace_name();
  out.session = request.session();
  out.priority = request.priority();
  SPLICE_RETURN_IF_ERROR(ProtoNames(request.prompt().kind_case()).In(ValidateRequest(out)));
  return out;
}

absl::StatusOr<Caller> InferenceService::Authenticate(const grpc::CallbackServerContext& context) const {
  const auto& metadata = context.client_metadata();
  const auto it = metadata.find("authorization");
  return keys_.Authenticate(it == metadata.end() ? std::string_view()
                                                 : std::string_view(it->second.data(), it->second.size()));
}

grpc::ServerWriteReactor<v1::GenerateResponse>* InferenceService::Generate(grpc::CallbackServerContext* context,
                                                                           const v1::GenerateRequest* request) {
  const std::shared_ptr<GenerateReactor> reactor = GenerateReactor::Create(context);
  absl::StatusOr<Caller> caller = Authenticate(*context);
  if (!caller.ok()) {
    reactor->OnError(caller.status());
    return reactor.get();
  }
  absl::StatusOr<RateLimits::Lease> lease = core_.Admit(*caller);
  if (!lease.ok()) {
    reactor->OnError(lease.status());
    return reactor.get();
  }
  const auto received = std::chrono::steady_clock::now();
  const auto held = std::make_shared<RateLimits::Lease>(*std::move(lease));  // work in a queue must be copyable
  const std::string name = caller->name;
  // `request` lives until the call is done, which is not before the reactor finishes.
  const bool posted = pool_.TryPost(name, [this, reactor, context, request, received, held, caller = *caller] {
    absl::StatusOr<GenerationRequest> plain = FromProto(*request, core_.model().default_sampling());
    if (!plain.ok()) return reactor->OnError(plain.status());
    plain->caller = caller;
    plain->received = received;
    const auto metadata = [context](const char* key) {
      const auto found = context->client_metadata().find(key);
      if (found == context->client_metadata().end()) return std::string_view();
      return std::string_view(found->second.data(), found->second.size());
    };
    core_.BeginTrace(*plain, metadata("traceparent"), metadata("tracestate"));
    context->AddInitialMetadata("traceparent", plain->trace.ToTraceParent());
    plain->deadline = FromGrpcDeadline(context->deadline());
    const auto waiting = std::make_shared<GenerationRequest>(*std::move(plain));
    bases_.Resolve(caller, &waiting->prompt, &waiting->knowledge_bases,
                   [this, reactor, waiting, held](const absl::Status& resolved) {
                     if (!resolved.ok()) return reactor->OnError(resolved);
                     if (waiting->echo) reactor->SetEcho(EchoText(core_.model(), *waiting, waiting->prompt));
                     const std::shared_ptr<Generation> generation =
                         core_.Create(std::move(*waiting), reactor, std::move(*held));
                     reactor->Attach(generation);
                     generation->Start();
                   });
  });
  if (!posted) reactor->OnError(PoolFull());
  return reactor.get();
}

void InferenceService::Count(const Caller& caller, const v1::CountTokensRequest& request,
                             v1::CountTokensResponse* response,
                             const std::function<void(const absl::Status&)>& done) const {
  if (const absl::Status named = core_.model().CheckName(request.model()); !named.ok()) return done(named);
  absl::StatusOr<Prompt> prompt = FromProto(request.prompt());
  if (!prompt.ok()) return done(prompt.status());
  struct Waiting {
    Prompt prompt;
    std::map<std::string, uint64_t> versions;
  };
  const auto waiting = std::make_shared<Waiting>();
  waiting->prompt = *std::move(prompt);
  bases_.Resolve(caller, &waiting->prompt, &waiting->versions,
                 [this, &request, response, waiting, done](const absl::Status& resolved) {
                   done(resolved.ok() ? CountResolved(request, waiting->prompt, response) : resolved);
                 });
}

absl::Status InferenceService::CountResolved(const v1::CountTokensRequest& request, const Prompt& prompt,
                                             v1::CountTokensResponse* response) const {
  SPLICE_ASSIGN_OR_RETURN(const TokenizedPrompt tokens, core_.model().Tokenize(prompt, true));
  const std::vector<TokenId>& ids = tokens.ids;
  SPLICE_RETURN_IF_ERROR(core_.CheckCounted(ids.size(), "prompt"));
  response->set_num_tokens(static_cast<uint32_t>(ids.size()));
  response->set_max_context(core_.max_context());
  if (request.return_ids()) response->mutable_ids()->Add(ids.begin(), ids.end());
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* InferenceService::CountTokens(grpc::CallbackServerContext* context,
                                                        const v1::CountTokensRequest* request,
                                                        v1::CountTokensResponse* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  absl::StatusOr<Caller> caller = Authenticate(*context);
  if (!caller.ok()) {
    reactor->Finish(ToGrpcStatus(caller.status()));
    return reactor;
  }
  absl::StatusOr<RateLimits::Lease> lease = core_.Admit(*caller);
  if (!lease.ok()) {
    reactor->Finish(ToGrpcStatus(lease.status()));
    return reactor;
  }
  const auto held = std::make_shared<RateLimits::Lease>(*std::move(lease));
  const std::string name = caller->name;
  const bool posted = pool_.TryPost(name, [this, reactor, request, response, held, caller = *caller] {
    Count(caller, *request, response,
          [reactor, held](const absl::Status& status) { reactor->Finish(ToGrpcStatus(status)); });
  });
  if (!posted) reactor->Finish(ToGrpcStatus(PoolFull()));
  return reactor;
}

grpc::ServerUnaryReactor* InferenceService::ListModels(grpc::CallbackServerContext* context,
                                                       const v1::ListModelsRequest*, v1::ListModelsResponse* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::Status known = Authenticate(*context).status();
  if (known.ok()) {
    const std::shared_ptr<const FleetSnapshot> fleet = core_.fleet().snapshot();
    v1::ModelIdentity* model = response->add_models();
    model->set_name(core_.model().name());
    model->set_max_context(core_.max_context());
    model->set_vocab_size(static_cast<uint32_t>(core_.model().tokenizer().vocab_size()));
    const Sampling& sampling = core_.model().default_sampling();
    v1::SamplingParams& shown = *response->mutable_default_sampling();
    shown.set_temperature(sampling.temperature);
    shown.set_top_k(sampling.top_k);
    shown.set_top_p(sampling.top_p);
    shown.set_min_p(sampling.min_p);
    shown.set_repetition_penalty(sampling.repetition_penalty);
    if (fleet->model.known) {
      model->set_fingerprint(fleet->model.fingerprint.data(), fleet->model.fingerprint.size());
      model->set_layout_digest(fleet->model.layout_digest);
      model->set_vocab_size(fleet->model.vocab_size);
      model->set_weights(fleet->model.weights);
      model->set_kv_dtype(fleet->model.kv_dtype);
      model->set_fp8_activation_rows(fleet->model.fp8_activation_rows);
    }
  }
  reactor->Finish(ToGrpcStatus(known));
  return reactor;
}

}  // namespace spl::router
