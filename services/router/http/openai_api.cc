#include "services/router/http/openai_api.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "services/base/version.h"
#include "services/base/vllm_metrics.h"
#include "services/router/http/error_response.h"
#include "services/router/http/messages_door.h"
#include "services/router/http/openai_door.h"
#include "services/router/http/request_fields.h"
#include "services/router/request/api_error.h"
#include "services/router/request/messages_request.h"

namespace spl::router {
namespace {

constexpr char kModelPrefix[] = "/v1/models/";

OrderedJson ModelJson(Dispatcher& core, int64_t created) {
  OrderedJson model;
  model["id"] = core.model().name();
  model["object"] = "model";
  model["created"] = created;
  model["owned_by"] = "splice";
  model["max_model_len"] = core.max_context();
  const Sampling& sampling = core.model().default_sampling();
  model["default_sampling_params"] = {{"temperature", Shortest(sampling.temperature)},
                                      {"top_k", sampling.top_k},
                                      {"top_p", Shortest(sampling.top_p)},
                                      {"min_p", Shortest(sampling.min_p)},
                                      {"repetition_penalty", Shortest(sampling.repetition_penalty)}};
  // Once a worker has answered.
  const std::shared_ptr<const FleetSnapshot> fleet = core.fleet().snapshot();
  if (!fleet->model.weights.empty()) model["weights"] = fleet->model.weights;
  if (!fleet->model.kv_dtype.empty()) model["kv_dtype"] = fleet->model.kv_dtype;
  if (fleet->model.fp8_activation_rows > 0) model["fp8_activation_rows"] = fleet->model.fp8_activation_rows;
  return model;
}

}  // namespace

OpenAiApi::OpenAiApi(Dispatcher& core, KnowledgeBases& bases, const ApiKeys& keys, FairPool& pool, WorkPool& probes,
                     Metrics& metrics, OpenAiApiOptions options)
    : core_(core),
      bases_(bases),
      keys_(keys),
      pool_(pool),
      probes_(probes),
      metrics_(metrics),
      options_(std::move(options)),
      generations_(core, bases, options_.strict_requests),
      responses_(core.model(), core.namespace_keys(), metrics, options_.stored_responses),
      model_route_{
          {"GET"}, true, Place::kHere, [this](const ExchangePtr& e, const Caller&, const LeasePtr&) { GetModel(e); }},
      response_route_{
          {"GET", "DELETE"},
          true,
          Place::kHere,
          [this](const ExchangePtr& e, const Caller& caller, const LeasePtr&) { responses_.Answer(*e, caller); }},
      started_at_(UnixSeconds()) {
  AddPosts();
  AddGets();
}

OpenAiApi::Route OpenAiApi::Generating(ReadCall read) {
  return {{"POST"},
          true,
          Place::kPool,
          [this, read = std::move(read)](const ExchangePtr& e, const Caller& caller, const LeasePtr& lease) {
            generations_.Generate(e, caller, lease, [&](const std::string& body, const std::string& request_id) {
              return read(body, request_id, caller);
            });
          }};
}

void OpenAiApi::AddPosts() {
  using std::string;
  const auto posted = [](Handler handler) { return Route{{"POST"}, true, Place::kPool, std::move(handler)}; };
  const ServedModel& model = core_.model();
  routes_["/v1/chat/completions"] = Generating([&model](const string& body, const string& id, const Caller&) {
    return ReadOpenAiCall(body, id, model, /*chat=*/true);
  });
  routes_["/v1/completions"] = Generating([&model](const string& body, const string& id, const Caller&) {
    return ReadOpenAiCall(body, id, model, /*chat=*/false);
  });
  routes_["/v1/messages"] = Generating(
      [&model](const string& body, const string& id, const Caller&) { return ReadMessagesCall(body, id, model); });
  routes_["/v1/responses"] = Generating(
      [this](const string& body, const string&, const Caller& caller) { return responses_.Read(body, caller); });
  routes_["/v1/messages/count_tokens"] =
      posted([this](const ExchangePtr& e, const Caller& c, const LeasePtr&) { CountMessageTokens(e, c); });
  const Route tokenize = posted([this](const ExchangePtr& e, const Caller& c, const LeasePtr&) { Tokenize(e, c); });
  const Route detokenize = posted([this](const ExchangePtr& e, const Caller&, const LeasePtr&) { Detokenize(e); });
  routes_["/tokenize"] = routes_["/v1/tokenize"] = tokenize;
  routes_["/detokenize"] = routes_["/v1/detokenize"] = detokenize;
}

void OpenAiApi::AddGets() {
  const auto text = [](int status, const char* body) {
    return HttpResponse{.status = status, .content_type = "text/plain; charset=utf-8", .body = body};
  };
  const auto here = [](bool authenticated, std::function<void(const ExchangePtr&)> answer) {
    return Route{{"GET"},
                 authenticated,
                 Place::kHere,
                 [answer = std::move(answer)](const ExchangePtr& e, const Caller&, const LeasePtr&) { answer(e); }};
  };
  const Route alive = here(false, [text](const ExchangePtr& e) { e->Respond(text(200, "ok\n")); });
  routes_["/healthz"] = alive;
  routes_["/health"] = alive;  // vLLM's name
  routes_["/readyz"] = here(false, [this, text](const ExchangePtr& e) {
    e->Respond(core_.ready() ? text(200, "ready\n") : text(503, "no connected pair of workers\n"));
  });
  routes_["/v1/models"] = here(true, [this](const ExchangePtr& e) { ListModels(e); });
  routes_["/version"] = here(false, [](const ExchangePtr& e) {
    RespondJson(*e, OrderedJson{{"version", Version()}, {"commit", Commit()}});
  });
  routes_["/"] = here(false, [](const ExchangePtr& e) {
    e->Respond({.status = 302, .content_type = "text/plain", .headers = {{"location", "/ui"}}});
  });
  routes_["/metrics"] = {
      {"GET"}, false, Place::kProbes, [this](const ExchangePtr& e, const Caller&, const LeasePtr&) {
        e->Respond({.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = MetricsPage()});
      }};
}

std::string OpenAiApi::MetricsPage() const {
  if (options_.beside.empty()) return RenderMetrics(metrics_, options_.vllm_model_name);
  std::vector<ProgramMetrics> programs = {{"router", &metrics_}};
  programs.insert(programs.end(), options_.beside.begin(), options_.beside.end());
  return RenderMetrics(programs, options_.vllm_model_name);
}

std::string OpenAiApi::ErrorBodyOf(int status, const std::string& message, const std::string& path) {
  return ErrorBodyFor(path, absl::InvalidArgumentError(absl::string_view(message.data(), message.size())), status);
}

bool OpenAiApi::Route::Takes(const std::string& method) const {
  return std::find(methods.begin(), methods.end(), method) != methods.end();
}

const OpenAiApi::Route* OpenAiApi::FindRoute(const HttpRequest& request) const {
  std::string path = request.path;
  if (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const auto it = routes_.find(path);
  if (it != routes_.end()) return &it->second;
  if (request.path.starts_with(kResponsesPrefix)) return &response_route_;
  return request.path.starts_with(kModelPrefix) ? &model_route_ : nullptr;
}

// No body is read without a key: routes that need no key have no body.
std::optional<HttpResponse> OpenAiApi::Refuse(const HttpRequest& header) const {
  const Route* const route = FindRoute(header);
  const bool authenticated = route != nullptr && route->authenticated && route->Takes(header.method);
  if (!authenticated && !header.has_body) return std::nullopt;
  const absl::Status known = keys_.Authenticate(header.authorization).status();
  return known.ok() ? std::nullopt : std::optional(ErrorResponse(known, "", {}, header.path));
}

void OpenAiApi::Handle(ExchangePtr exchange) {
  const HttpRequest& request = exchange->request();
  const Route* const route = FindRoute(request);
  if (route == nullptr) {
    const absl::Status missing =
        Errorf(absl::StatusCode::kNotFound, "there is no {} {} here", request.method, request.path);
    return RespondError(*exchange, SetErrorCode(missing, "unknown_url"), "");
  }
  if (!route->Takes(request.method)) {
    const std::string allowed = fmt::format("{}", fmt::join(route->methods, ", "));
    const std::string message = fmt::format("{} takes {} only, got {}", request.path, allowed, request.method);
    return exchange->Respond(
        {.status = 405, .body = ErrorBodyOf(405, message, request.path), .headers = {{"allow", allowed}}});
  }
  Caller caller;
  if (route->authenticated) {
    absl::StatusOr<Caller> known = keys_.Authenticate(request.authorization);
    if (!known.ok()) return RespondError(*exchange, known.status(), "");
    caller = *std::move(known);
  }
  if (route->place == Place::kHere) return route->handler(exchange, caller, nullptr);
  bool posted = false;
  if (route->place == Place::kProbes) {
    posted = probes_.TryPost([route, exchange] { route->handler(exchange, Caller(), nullptr); });
  } else {
    absl::StatusOr<RateLimits::Lease> lease = core_.Admit(caller);
    if (!lease.ok()) {
      return RespondError(*exchange, lease.status(), RequestIdOf(request),
                          core_.limits().HeadersFor(caller, std::chrono::steady_clock::now()));
    }
    const auto held = std::make_shared<RateLimits::Lease>(*std::move(lease));  // work in a queue must be copyable
    posted = pool_.TryPost(caller.name, [route, exchange, caller, held] { route->handler(exchange, caller, held); });
  }
  if (posted) return;
  const absl::Status full =
      SetRetryAfterMs(Errorf(absl::StatusCode::kResourceExhausted, "too many requests wait to be read"), 1000);
  RespondError(*exchange, full, "");
}

void OpenAiApi::TokenizePrompt(const ExchangePtr& exchange, const Caller& caller, TokenizeRequest request,
                               FieldNames names, RespondIds respond) {
  absl::Status checked = CheckIgnored(request.ignored, options_.strict_requests);
  if (checked.ok()) checked = core_.model().CheckName(request.model);
  if (!checked.ok()) return RespondError(*exchange, checked, "");
  struct Waiting {
    TokenizeRequest request;
    FieldNames names;
    Prompt prompt;
    std::map<std::string, uint64_t> versions;
  };
  const auto waiting = std::make_shared<Waiting>();
  waiting->prompt = std::visit([](const auto& p) { return Prompt(p); }, request.prompt);
  waiting->request = std::move(request);
  waiting->names = std::move(names);
  bases_.Resolve(caller, &waiting->prompt, &waiting->versions,
                 [this, exchange, waiting, respond = std::move(respond)](const absl::Status& resolved) {
                   const auto fail = [&](const absl::Status& why) {
                     RespondError(*exchange, waiting->names.In(why), "");
                   };
                   if (!resolved.ok()) return fail(resolved);
                   const auto tokens = core_.model().Tokenize(waiting->prompt, waiting->request.add_special_tokens);
                   if (!tokens.ok()) return fail(tokens.status());
                   const bool chat = std::holds_alternative<ChatPrompt>(waiting->request.prompt);
                   const absl::Status counted = core_.CheckCounted(tokens->ids.size(), chat ? "messages" : "prompt");
                   if (!counted.ok()) return fail(counted);
                   respond(waiting->request, tokens->ids);
                 });
}

void OpenAiApi::Tokenize(const ExchangePtr& exchange, const Caller& caller) {
  absl::StatusOr<TokenizeRequest> parsed = ParseTokenizeBody(exchange->TakeBody());
  if (!parsed.ok()) return RespondError(*exchange, parsed.status(), "");
  TokenizePrompt(exchange, caller, *std::move(parsed), {},
                 [this, exchange](const TokenizeRequest& request, const std::vector<TokenId>& ids) {
                   OrderedJson out;
                   out["count"] = ids.size();
                   out["max_model_len"] = core_.max_context();
                   out["tokens"] = ids;
                   out["token_strs"] = nullptr;
                   if (request.return_token_strs) {
                     out["token_strs"] = OrderedJson::array();
                     for (const TokenId id : ids)
                       out["token_strs"].push_back(std::string(core_.model().tokenizer().Piece(id)));
                   }
                   RespondJson(*exchange, out, IgnoredHeader(request.ignored));
                 });
}

void OpenAiApi::CountMessageTokens(const ExchangePtr& exchange, const Caller& caller) {
  absl::StatusOr<GenerationCall> call = ReadMessagesCall(exchange->TakeBody(), "", core_.model());
  if (!call.ok()) return RespondError(*exchange, call.status(), "");
  GenerationRequest& generation = call->request.generation;
  TokenizeRequest request{.model = generation.model,
                          .prompt = std::get<ChatPrompt>(std::move(generation.prompt)),
                          .add_special_tokens = generation.add_special_tokens,
                          .ignored = std::move(call->request.ignored)};
  TokenizePrompt(exchange, caller, std::move(request), std::move(call->names),
                 [exchange](const TokenizeRequest& read, const std::vector<TokenId>& ids) {
                   RespondJson(*exchange, OrderedJson{{"input_tokens", ids.size()}}, IgnoredHeader(read.ignored));
                 });
}

void OpenAiApi::Detokenize(const ExchangePtr& exchange) {
  const absl::StatusOr<DetokenizeRequest> request = ParseDetokenizeBody(exchange->TakeBody());
  if (!request.ok()) return RespondError(*exchange, request.status(), "");
  const absl::Status strict = CheckIgnored(request->ignored, options_.strict_requests);
  if (!strict.ok()) return RespondError(*exchange, strict, "");
  const absl::Status counted = core_.CheckCounted(request->tokens.size(), "tokens");
  if (!counted.ok()) return RespondError(*exchange, counted, "");
  const absl::Status named = core_.model().CheckName(request->model);
  if (!named.ok()) return RespondError(*exchange, named, "");
  const absl::StatusOr<std::string> text =
      core_.model().tokenizer().Decode(request->tokens, {.skip_special_tokens = false});
  if (!text.ok()) {
    return RespondError(*exchange, SetParam(Annotate(text.status(), "tokens"), "tokens"), "");
  }
  RespondJson(*exchange, OrderedJson{{"prompt", *text}}, IgnoredHeader(request->ignored));
}

void OpenAiApi::ListModels(const ExchangePtr& exchange) {
  OrderedJson out;
  out["object"] = "list";
  out["data"] = OrderedJson::array({ModelJson(core_, started_at_)});
  RespondJson(*exchange, out);
}

void OpenAiApi::GetModel(const ExchangePtr& exchange) {
  const std::string name = exchange->request().path.substr(sizeof(kModelPrefix) - 1);
  const absl::Status named = core_.model().CheckName(name.empty() ? "?" : name);
  if (!named.ok()) return RespondError(*exchange, named, "");
  RespondJson(*exchange, ModelJson(core_, started_at_));
}

}  // namespace spl::router
