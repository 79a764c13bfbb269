#include "services/router/http/answer_sink.h"

#include <utility>

#include "services/router/http/error_response.h"
#include "services/router/request/api_error.h"

namespace spl::router {

namespace {

constexpr size_t kLogprobBytes = 96;  // JSON bytes of one alternative

void Append(HttpHeaders more, HttpHeaders* headers) {
  for (auto& header : more) headers->push_back(std::move(header));
}

void Refuse(const Reply& reply, const absl::Status& status) {
  RespondError(*reply.exchange, reply.names.In(status), reply.request_id, reply.headers());
}

}  // namespace

bool StreamSink::OnOutput(std::span<const Delta> deltas, const FinalInfo* final) {
  if (!started_) {
    started_ = true;
    HttpHeaders headers = {{"cache-control", "no-cache"}, {"x-accel-buffering", "no"}};
    Append(RequestIdHeaders(reply_.exchange->request().path, reply_.request_id), &headers);
    Append(reply_.headers(), &headers);
    reply_.exchange->StartStream("text/event-stream; charset=utf-8", headers);
  }
  const bool more = reply_.exchange->Write(reply_.formatter->Events(deltas, final));
  if (final != nullptr) reply_.exchange->EndStream();
  return more;
}

// A stream that has begun can only say so in the stream; without the end mark no client takes it for complete.
void StreamSink::OnError(const absl::Status& status) {
  if (!started_) return Refuse(reply_, status);
  reply_.exchange->Write(reply_.formatter->ErrorEvents(reply_.names.In(status)));
  reply_.exchange->EndStream();
}

bool WholeSink::OnOutput(std::span<const Delta> deltas, const FinalInfo* final) {
  if (collected_bytes_ > kMaxWholeBytes) return true;  // given up: further output is dropped
  reply_.formatter->Add(deltas);
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
    reply_.formatter->Clear();
    give_up_(
        ParamError("stream", "the answer takes more than {} MiB: ask for a stream, or for less", kMaxWholeBytes >> 20));
    return true;
  }
  if (final == nullptr) return true;
  HttpResponse response;
  response.body = Dump(reply_.formatter->Whole(*final));
  response.headers = reply_.headers();
  Append(RequestIdHeaders(reply_.exchange->request().path, reply_.request_id), &response.headers);
  reply_.exchange->Respond(std::move(response));
  return true;
}

void WholeSink::OnError(const absl::Status& status) { Refuse(reply_, status); }

}  // namespace spl::router
