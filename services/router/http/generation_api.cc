#include "services/router/http/generation_api.h"

#include <chrono>
#include <iterator>
#include <utility>

#include "services/base/status.h"
#include "services/router/dispatch/generation.h"
#include "services/router/http/error_response.h"
#include "services/router/http/prompt_merger.h"
#include "services/router/http/request_fields.h"
#include "services/router/request/framed_answer.h"

namespace spl::router {
namespace {

AnswerFormat FormatOf(const ApiRequest& request, const OutputFormat& model) {
  AnswerFormat out{.format = model, .tools_json = request.tools_json, .forced = request.forced_calls.has_value()};
  const bool structured = request.generation.sampling.structured_output.has_value();
  out.framed = request.framed;
  if (structured && !request.framed) out.format.reasoning = "none";  // nothing in it means anything else
  if (structured && !request.forced_calls.has_value()) out.format.tools = "none";
  return out;
}

SpecialTokenId SpecialTokensOf(const tokenizer::Tokenizer& tokenizer) {
  return [&tokenizer](std::string_view text) {
    const std::optional<TokenId> id = tokenizer.IdOf(text);
    return id.has_value() && tokenizer.IsSpecial(*id) ? id : std::nullopt;
  };
}

}  // namespace

void GenerationApi::Generate(const ExchangePtr& exchange, const Caller& caller, const LeasePtr& lease,
                             const ReadCall& read) {
  const std::string request_id = RequestIdOf(exchange->request());
  // The body is not kept while the answer is made.
  absl::StatusOr<GenerationCall> call = read(exchange->TakeBody(), request_id);
  if (!call.ok()) return RespondError(*exchange, call.status(), request_id);
  const absl::Status complete = Complete(exchange->request(), caller, request_id, &*call);
  if (!complete.ok()) return RespondError(*exchange, call->names.In(complete), request_id);
  const auto waiting = std::make_shared<GenerationCall>(*std::move(call));
  GenerationRequest& request = waiting->request.generation;
  bases_.Resolve(caller, &request.prompt, &request.knowledge_bases,
                 [this, exchange, caller, lease, waiting, request_id](const absl::Status& resolved) {
                   if (!resolved.ok()) return RespondError(*exchange, waiting->names.In(resolved), request_id);
                   Start(exchange, caller, lease, std::move(*waiting));
                 });
}

absl::Status GenerationApi::Complete(const HttpRequest& http, const Caller& caller, const std::string& request_id,
                                     GenerationCall* call) const {
  ApiRequest& parsed = call->request;
  GenerationRequest& request = parsed.generation;
  if (const auto* const messages = std::get_if<ChatPrompt>(&request.prompt)) {
    for (const std::string& name : core_.model().VariablesWithoutEffect(*messages))
      parsed.ignored.push_back(call->names.Of(name));
  }
  SPLICE_RETURN_IF_ERROR(CheckIgnored(parsed.ignored, strict_));
  const SpecialTokenId special = SpecialTokensOf(core_.model().tokenizer());
  SPLICE_RETURN_IF_ERROR(ForceCalls(core_.model().output_format(), special, parsed));
  SPLICE_RETURN_IF_ERROR(FrameAnswer(core_.model().output_format(), special, parsed));
  request.request_id = request_id;
  request.caller = caller;
  request.received = http.received;
  core_.BeginTrace(request, http.traceparent, http.tracestate);
  return ReadTimeout(http, &request.deadline);
}

void GenerationApi::Start(const ExchangePtr& exchange, const Caller& caller, const LeasePtr& lease,
                          GenerationCall call) {
  ApiRequest& parsed = call.request;
  const OutputFormat& format = core_.model().output_format();
  const bool chat = std::holds_alternative<ChatPrompt>(parsed.generation.prompt);
  if (chat && NeedsSpecialTokens(format, !parsed.tools_json.empty())) parsed.generation.skip_special_tokens = false;
  const GenerationRequest& request = parsed.generation;
  const HeaderFn headers = [this, caller, traceparent = request.trace.ToTraceParent(),
                            ignored = IgnoredHeader(parsed.ignored)] {
    RateLimits::Headers out = core_.limits().HeadersFor(caller, std::chrono::steady_clock::now());
    out.emplace_back("traceparent", traceparent);
    out.insert(out.end(), ignored.begin(), ignored.end());
    return out;
  };
  Reply reply{.exchange = exchange,
              .formatter = call.make_formatter(parsed, FormatOf(parsed, format)),
              .request_id = request.request_id,
              .headers = headers,
              .names = call.names};
  std::shared_ptr<GenerationSink> sink;
  std::shared_ptr<WholeSink> whole;
  if (parsed.stream.stream) {
    sink = std::make_shared<StreamSink>(std::move(reply));
  } else {
    whole = std::make_shared<WholeSink>(std::move(reply));
    sink = whole;
  }
  const size_t num_prompts = 1 + parsed.more_prompts.size();
  const auto merger =
      std::make_shared<PromptMerger>(num_prompts == 1 ? nullptr : sink, num_prompts, request.sampling.n);
  const std::string request_id = request.request_id;
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

absl::StatusOr<std::vector<std::shared_ptr<Generation>>> GenerationApi::MakeGenerations(
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

}  // namespace spl::router
