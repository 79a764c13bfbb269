#include "services/router/http/openai_sink.h"

#include "services/router/request/api_error.h"

namespace spl::router {

namespace {

constexpr size_t kLogprobBytes = 96;  // JSON bytes of one alternative

}  // namespace

HttpResponse ErrorResponse(const absl::Status& status, const std::string& request_id,
                           const RateLimits::Headers& headers) {
  HttpResponse response;
  response.headers = headers;
  response.status = HttpStatusOf(status);
  response.body = ErrorBody(status, response.status);
  // Clients of OpenAI's library run a request again that took too long, and wait for it as long once more.
  if (response.status == 504) response.headers.emplace_back("x-should-retry", "false");
  if (!request_id.empty()) response.headers.emplace_back("x-request-id", request_id);
  if (const auto retry_ms = RetryAfterMsOf(status)) {
    response.headers.emplace_back("retry-after", std::to_string((*retry_ms + 999) / 1000));
  }
  return response;
}

void RespondError(HttpExchange& exchange, const absl::Status& status, const std::string& request_id,
                  const RateLimits::Headers& headers) {
  exchange.Respond(ErrorResponse(status, request_id, headers));
}

void RespondJson(HttpExchange& exchange, const OrderedJson& json, HttpHeaders headers) {
  HttpResponse response;
  response.headers = std::move(headers);
  response.body = Dump(json);
  exchange.Respond(std::move(response));
}

bool StreamSink::OnOutput(std::span<const Delta> deltas, const FinalInfo* final) {
  if (!started_) {
    started_ = true;
    RateLimits::Headers headers = {
        {"cache-control", "no-cache"}, {"x-accel-buffering", "no"}, {"x-request-id", request_id_}};
    for (auto& header : headers_()) headers.push_back(std::move(header));
    exchange_->StartStream("text/event-stream; charset=utf-8", headers);
  }
  const bool more = exchange_->Write(formatter_.Events(deltas, final));
  if (final != nullptr) exchange_->EndStream();
  return more;
}

// A stream that has begun can only say so in the stream; without the end mark no client takes it for complete.
void StreamSink::OnError(const absl::Status& status) {
  if (!started_) return RespondError(*exchange_, status, request_id_, headers_());
  exchange_->Write("data: " + ErrorBody(status, HttpStatusOf(status)) + "\n\n");
  exchange_->EndStream();
}

bool WholeSink::OnOutput(std::span<const Delta> deltas, const FinalInfo* final) {
  if (collected_bytes_ > kMaxWholeBytes) return true;  // given up: further output is dropped
  formatter_.Add(deltas);
  for (const Delta& delta : deltas) {
    collected_bytes_ += delta.text.size();
    const auto add = [&](const std::vector<OutputToken>& tokens) {
      for (const OutputToken& token : tokens)
        collected_bytes_ += token.has_logprob ? kLogprobBytes * (1 + token.top.size()) : sizeof(OutputToken);
    };
    add(delta.tokens);
    if (delta.prompt != nullptr) add(*delta.prompt);
  }
  if (collected_bytes_ > kMaxWholeBytes) {
    formatter_.Clear();
    give_up_(
        ParamError("stream", "the answer takes more than {} MiB: ask for a stream, or for less", kMaxWholeBytes >> 20));
    return true;
  }
  if (final == nullptr) return true;
  HttpResponse response;
  response.body = Dump(formatter_.Whole(*final));
  response.headers = headers_();
  response.headers.emplace_back("x-request-id", request_id_);
  exchange_->Respond(std::move(response));
  return true;
}

void WholeSink::OnError(const absl::Status& status) { RespondError(*exchange_, status, request_id_, headers_()); }

}  // namespace spl::router
