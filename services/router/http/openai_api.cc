#include "services/router/http/openai_api.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <iterator>
#include <utility>

#include "services/base/ids.h"
#include "services/base/version.h"
#include "services/base/vllm_metrics.h"
#include "services/router/dispatch/generation.h"
#include "services/router/http/openai_sink.h"
#include "services/router/http/prompt_merger.h"
#include "services/router/request/api_error.h"
#include "services/router/request/openai_request.h"
#include "services/router/request/openai_response.h"

namespace spl::router {
namespace {

constexpr char kModelPrefix[] = "/v1/models/";

int64_t UnixSeconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// The double of the float's own digits: 0.7, not 0.699999988079071.
double Shortest(float value) { return std::stod(fmt::format("{}", value)); }

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
  return model;
}

// A client's own id is kept when it is harmless in a header and a log line.
std::string RequestIdOf(const HttpRequest& request) {
  const std::string& given = request.request_id;
  const auto harmless = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
  };
  const bool usable = !given.empty() && given.size() <= 128 && std::all_of(given.begin(), given.end(), harmless);
  return usable ? given : RandomId::Make().ToHex();
}

absl::Status ReadTimeout(const HttpRequest& request, std::chrono::steady_clock::time_point* deadline) {
  const std::string& text = request.timeout_ms;
  if (text.empty()) return absl::OkStatus();
  const bool digits = text.size() <= 9 && text.find_first_not_of("0123456789") == std::string::npos;
  if (!digits || std::stoul(text) == 0) {
    return ParamError("x-request-timeout-ms", "must be a positive number of milliseconds, got \"{}\"", text);
  }
  *deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(std::stoul(text));
  return absl::OkStatus();
}

// A prompt as text, for echo.
std::string EchoText(const ServedModel& model, const GenerationRequest& request, const Prompt& prompt) {
  if (const auto* text = std::get_if<std::string>(&prompt)) return *text;
  // Segments and ids come back through the tokenizer.
  const absl::StatusOr<TokenizedPrompt> tokens = model.Tokenize(prompt, request.add_special_tokens);
  if (!tokens.ok()) return "";  // the request fails for the same reason
  return model.tokenizer().Decode(tokens->ids, {.skip_special_tokens = request.skip_special_tokens}).value_or("");
}

std::vector<std::string> EchoTexts(const ServedModel& model, const ApiRequest& parsed) {
  std::vector<std::string> texts = {EchoText(model, parsed.generation, parsed.generation.prompt)};
  for (const Prompt& prompt : parsed.more_prompts) texts.push_back(EchoText(model, parsed.generation, prompt));
  return texts;
}

// Names the first fields that had no effect; those that do not fit into a header are "?".
HttpHeaders IgnoredHeader(const std::vector<std::string>& ignored) {
  constexpr size_t kMaxNames = 16, kMaxNameBytes = 64;
  if (ignored.empty()) return {};
  std::string value;
  for (size_t i = 0; i < std::min(ignored.size(), kMaxNames); ++i) {
    const bool plain = std::all_of(ignored[i].begin(), ignored[i].end(), [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
    });
    value += (i > 0 ? "," : "") + (plain && ignored[i].size() <= kMaxNameBytes ? ignored[i] : "?");
  }
  if (ignored.size() > kMaxNames) value += ",...";
  return {{"x-splice-ignored", value}};
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
      model_route_{"GET", true, Place::kHere,
                   [this](const ExchangePtr& e, const Caller&, const LeasePtr&) { GetModel(e); }},
      started_at_(UnixSeconds()) {
  const auto posted = [](Handler handler) { return Route{"POST", true, Place::kPool, std::move(handler)}; };
  const Route tokenize = posted([this](const ExchangePtr& e, const Caller& c, const LeasePtr&) { Tokenize(e, c); });
  const Route detokenize = posted([this](const ExchangePtr& e, const Caller&, const LeasePtr&) { Detokenize(e); });
  routes_ = {
      {"/v1/chat/completions",
       posted([this](const ExchangePtr& e, const Caller& c, const LeasePtr& l) { Generate(e, c, l, true); })},
      {"/v1/completions",
       posted([this](const ExchangePtr& e, const Caller& c, const LeasePtr& l) { Generate(e, c, l, false); })},
      {"/tokenize", tokenize},
      {"/v1/tokenize", tokenize},
      {"/detokenize", detokenize},
      {"/v1/detokenize", detokenize},
  };
  AddGets();
}

void OpenAiApi::AddGets() {
  const auto text = [](int status, const char* body) {
    return HttpResponse{.status = status, .content_type = "text/plain; charset=utf-8", .body = body};
  };
  const auto here = [](bool authenticated, std::function<void(const ExchangePtr&)> answer) {
    return Route{"GET", authenticated, Place::kHere,
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
  routes_["/metrics"] = {"GET", false, Place::kProbes, [this](const ExchangePtr& e, const Caller&, const LeasePtr&) {
                           e->Respond({.content_type = "text/plain; version=0.0.4; charset=utf-8",
                                       .body = RenderMetrics(metrics_, options_.vllm_model_name)});
                         }};
}

std::string OpenAiApi::ErrorBodyFor(int status, const std::string& message) {
  return ErrorBody(absl::InvalidArgumentError(absl::string_view(message.data(), message.size())), status);
}

const OpenAiApi::Route* OpenAiApi::FindRoute(const HttpRequest& request) const {
  std::string path = request.path;
  if (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const auto it = routes_.find(path);
  if (it != routes_.end()) return &it->second;
  return request.path.rfind(kModelPrefix, 0) == 0 ? &model_route_ : nullptr;
}

// No body is read without a key: routes that need no key have no body.
std::optional<HttpResponse> OpenAiApi::Refuse(const HttpRequest& header) const {
  const Route* const route = FindRoute(header);
  const bool authenticated = route != nullptr && route->authenticated && header.method == route->method;
  if (!authenticated && !header.has_body) return std::nullopt;
  const absl::Status known = keys_.Authenticate(header.authorization).status();
  return known.ok() ? std::nullopt : std::optional(ErrorResponse(known));
}

void OpenAiApi::Handle(ExchangePtr exchange) {
  const HttpRequest& request = exchange->request();
  const Route* const route = FindRoute(request);
  if (route == nullptr) {
    const absl::Status missing =
        Errorf(absl::StatusCode::kNotFound, "there is no {} {} here", request.method, request.path);
    return RespondError(*exchange, SetErrorCode(missing, "unknown_url"), "");
  }
  if (request.method != route->method) {
    const std::string message = fmt::format("{} takes {} only, got {}", request.path, route->method, request.method);
    return exchange->Respond(
        {.status = 405, .body = ErrorBodyFor(405, message), .headers = {{"allow", route->method}}});
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

void OpenAiApi::Generate(const ExchangePtr& exchange, const Caller& caller, const LeasePtr& lease, bool chat) {
  const HttpRequest& http = exchange->request();
  const std::string request_id = RequestIdOf(http);
  absl::StatusOr<ApiRequest> parsed = [&] {
    const std::string body = exchange->TakeBody();  // not kept while the answer is made
    const Sampling& defaults = core_.model().default_sampling();
    return chat ? ParseChatBody(body, defaults) : ParseCompletionBody(body, defaults);
  }();
  if (!parsed.ok()) return RespondError(*exchange, parsed.status(), request_id);
  GenerationRequest& request = parsed->generation;
  if (const auto* const messages = std::get_if<ChatPrompt>(&request.prompt)) {
    for (std::string& name : core_.model().VariablesWithoutEffect(*messages))
      parsed->ignored.push_back(std::move(name));
  }
  absl::Status checked = CheckIgnored(parsed->ignored);
  if (checked.ok()) checked = ForceCalls(core_.model().output_format(), *parsed);
  if (checked.ok()) checked = ReadTimeout(http, &request.deadline);
  if (!checked.ok()) return RespondError(*exchange, checked, request_id);
  request.request_id = request_id;
  request.caller = caller;
  request.received = http.received;
  core_.BeginTrace(request, http.traceparent, http.tracestate);
  const auto waiting = std::make_shared<ApiRequest>(*std::move(parsed));
  bases_.Resolve(caller, &waiting->generation.prompt, &waiting->generation.knowledge_bases,
                 [this, exchange, caller, lease, chat, waiting, request_id](const absl::Status& resolved) {
                   if (!resolved.ok()) return RespondError(*exchange, resolved, request_id);
                   StartGeneration(exchange, caller, lease, chat, std::move(*waiting));
                 });
}

void OpenAiApi::StartGeneration(const ExchangePtr& exchange, const Caller& caller, const LeasePtr& lease, bool chat,
                                ApiRequest parsed) {
  if (chat && NeedsSpecialTokens(core_.model().output_format(), !parsed.tools_json.empty()))
    parsed.generation.skip_special_tokens = false;
  const GenerationRequest& request = parsed.generation;
  const std::string request_id = request.request_id;
  OpenAiFormatter::Head head{.chat = chat,
                             .id = (chat ? "chatcmpl-" : "cmpl-") + request_id,
                             .created = UnixSeconds(),
                             .model = core_.model().name(),
                             .logprobs = request.sampling.logprobs,
                             .prompt_logprobs = parsed.prompt_logprobs,
                             .include_usage = parsed.stream.include_usage,
                             .continuous_usage = parsed.stream.continuous_usage,
                             .num_continuations = request.sampling.n,
                             .output_format = core_.model().output_format(),
                             .tools_json = parsed.tools_json};
  if (request.echo) head.echo_texts = EchoTexts(core_.model(), parsed);
  const bool structured = request.sampling.structured_output.has_value();  // nothing in it means anything else
  if (structured) head.output_format.reasoning = "none";
  if (structured && !parsed.forced_calls.has_value()) head.output_format.tools = "none";
  OpenAiFormatter formatter(core_.model().tokenizer(), std::move(head));
  const HeaderFn headers = [this, caller, traceparent = request.trace.ToTraceParent(),
                            ignored = IgnoredHeader(parsed.ignored)] {
    RateLimits::Headers out = core_.limits().HeadersFor(caller, std::chrono::steady_clock::now());
    out.emplace_back("traceparent", traceparent);
    out.insert(out.end(), ignored.begin(), ignored.end());
    return out;
  };
  std::shared_ptr<GenerationSink> sink;
  std::shared_ptr<WholeSink> whole;
  if (parsed.stream.stream) {
    sink = std::make_shared<StreamSink>(exchange, std::move(formatter), request_id, headers);
  } else {
    whole = std::make_shared<WholeSink>(exchange, std::move(formatter), request_id, headers);
    sink = whole;
  }
  const size_t num_prompts = 1 + parsed.more_prompts.size();
  const auto merger =
      std::make_shared<PromptMerger>(num_prompts == 1 ? nullptr : sink, num_prompts, request.sampling.n);
  absl::StatusOr<std::vector<std::shared_ptr<Generation>>> generations =
      MakeGenerations(caller, std::move(parsed), std::move(*lease), num_prompts == 1 ? sink : nullptr, *merger);
  if (!generations.ok()) return RespondError(*exchange, generations.status(), request_id, headers());
  merger->SetGenerations({generations->begin(), generations->end()});
  if (whole != nullptr) {
    whole->SetGiveUp([weak = std::weak_ptr(merger)](const absl::Status& status) {
      if (const auto held = weak.lock()) held->Cancel(status);
    });
  }
  exchange->SetDrainCallback([merger] { merger->Resume(); });
  exchange->SetDisconnectCallback([merger] { merger->Cancel(absl::CancelledError("the client left")); });
  for (const auto& generation : *generations) generation->Start();
}

absl::StatusOr<std::vector<std::shared_ptr<Generation>>> OpenAiApi::MakeGenerations(
    const Caller& caller, ApiRequest parsed, RateLimits::Lease lease, const std::shared_ptr<GenerationSink>& sink,
    PromptMerger& merger) {
  std::vector<Prompt> prompts = {std::move(parsed.generation.prompt)};
  std::move(parsed.more_prompts.begin(), parsed.more_prompts.end(), std::back_inserter(prompts));
  std::vector<RateLimits::Lease> leases;  // every prompt counts as a request
  leases.push_back(std::move(lease));
  while (leases.size() < prompts.size()) {
    SPLICE_ASSIGN_OR_RETURN(RateLimits::Lease more, core_.Admit(caller));
    leases.push_back(std::move(more));
  }
  std::vector<std::shared_ptr<Generation>> generations;
  for (size_t i = 0; i < prompts.size(); ++i) {
    GenerationRequest request = parsed.generation;
    request.prompt = std::move(prompts[i]);
    if (i > 0) core_.BeginTrace(request, parsed.generation.trace.ToTraceParent(), "");
    generations.push_back(
        core_.Create(std::move(request), sink != nullptr ? sink : merger.SinkOf(i), std::move(leases[i])));
  }
  return generations;
}

absl::Status OpenAiApi::CheckIgnored(const std::vector<std::string>& ignored) const {
  if (!options_.strict_requests || ignored.empty()) return absl::OkStatus();
  return SetErrorCode(ParamError(ignored.front(), "has no effect here (--strict-requests)"), "unknown_field");
}

void OpenAiApi::Tokenize(const ExchangePtr& exchange, const Caller& caller) {
  const absl::StatusOr<TokenizeRequest> request = ParseTokenizeBody(exchange->TakeBody());
  if (!request.ok()) return RespondError(*exchange, request.status(), "");
  const absl::Status strict = CheckIgnored(request->ignored);
  if (!strict.ok()) return RespondError(*exchange, strict, "");
  const absl::Status named = core_.model().CheckName(request->model);
  if (!named.ok()) return RespondError(*exchange, named, "");
  struct Waiting {
    TokenizeRequest request;
    Prompt prompt;
    std::map<std::string, uint64_t> versions;
  };
  const auto waiting = std::make_shared<Waiting>();
  waiting->request = *request;
  waiting->prompt = std::visit([](const auto& p) { return Prompt(p); }, request->prompt);
  bases_.Resolve(caller, &waiting->prompt, &waiting->versions, [this, exchange, waiting](const absl::Status& resolved) {
    if (!resolved.ok()) return RespondError(*exchange, resolved, "");
    RespondTokens(*exchange, waiting->request, waiting->prompt);
  });
}

void OpenAiApi::RespondTokens(HttpExchange& exchange, const TokenizeRequest& request, const Prompt& prompt) const {
  const absl::StatusOr<TokenizedPrompt> tokens = core_.model().Tokenize(prompt, request.add_special_tokens);
  if (!tokens.ok()) return RespondError(exchange, tokens.status(), "");
  const std::vector<TokenId>& ids = tokens->ids;
  const char* const field = std::holds_alternative<ChatPrompt>(request.prompt) ? "messages" : "prompt";
  const absl::Status counted = core_.CheckCounted(ids.size(), field);
  if (!counted.ok()) return RespondError(exchange, counted, "");
  OrderedJson out;
  out["count"] = ids.size();
  out["max_model_len"] = core_.max_context();
  out["tokens"] = ids;
  out["token_strs"] = nullptr;
  if (request.return_token_strs) {
    out["token_strs"] = OrderedJson::array();
    for (const TokenId id : ids) out["token_strs"].push_back(std::string(core_.model().tokenizer().Piece(id)));
  }
  RespondJson(exchange, out, IgnoredHeader(request.ignored));
}

void OpenAiApi::Detokenize(const ExchangePtr& exchange) {
  const absl::StatusOr<DetokenizeRequest> request = ParseDetokenizeBody(exchange->TakeBody());
  if (!request.ok()) return RespondError(*exchange, request.status(), "");
  const absl::Status strict = CheckIgnored(request->ignored);
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
