// A generation's output as an HTTP response: server-sent events or one JSON object.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "services/router/dispatch/generation.h"
#include "services/router/http/http_server.h"
#include "services/router/request/openai_response.h"

namespace spl::router {

// The API's error object for `status`, with the matching HTTP status, and Retry-After if known.
HttpResponse ErrorResponse(const absl::Status& status, const std::string& request_id = "",
                           const RateLimits::Headers& headers = {});
// Sends ErrorResponse on the exchange.
void RespondError(HttpExchange& exchange, const absl::Status& status, const std::string& request_id,
                  const RateLimits::Headers& headers = {});
void RespondJson(HttpExchange& exchange, const OrderedJson& json, HttpHeaders headers = {});

// Returns the caller's rate-limit headers at the start of the response.
using HeaderFn = std::function<RateLimits::Headers()>;

// Sends one event per output. The response starts with the first one, so that earlier failures get their own HTTP
// status.
class StreamSink final : public GenerationSink {
 public:
  StreamSink(std::shared_ptr<HttpExchange> exchange, OpenAiFormatter formatter, std::string request_id,
             HeaderFn headers)
      : exchange_(std::move(exchange)),
        formatter_(std::move(formatter)),
        request_id_(std::move(request_id)),
        headers_(std::move(headers)) {}

  void OnPrompt(uint32_t num_tokens, std::span<const TokenId> prompt) override {
    formatter_.SetPrompt(num_tokens, prompt);
  }
  bool OnOutput(std::span<const Delta> deltas, const FinalInfo* final) override;
  void OnError(const absl::Status& status) override;

 private:
  const std::shared_ptr<HttpExchange> exchange_;
  OpenAiFormatter formatter_;
  const std::string request_id_;
  const HeaderFn headers_;
  bool started_ = false;
};

// Sends the whole answer at the end. If it takes more memory than kMaxWholeBytes, `give_up` ends the generation with
// the reason.
class WholeSink final : public GenerationSink {
 public:
  static constexpr size_t kMaxWholeBytes = 32 << 20;
  using GiveUp = std::function<void(const absl::Status&)>;

  WholeSink(std::shared_ptr<HttpExchange> exchange, OpenAiFormatter formatter, std::string request_id, HeaderFn headers)
      : exchange_(std::move(exchange)),
        formatter_(std::move(formatter)),
        request_id_(std::move(request_id)),
        headers_(std::move(headers)) {}

  void OnPrompt(uint32_t num_tokens, std::span<const TokenId> prompt) override {
    formatter_.SetPrompt(num_tokens, prompt);
  }
  bool OnOutput(std::span<const Delta> deltas, const FinalInfo* final) override;
  void OnError(const absl::Status& status) override;
  // Call before the first output.
  void SetGiveUp(GiveUp give_up) { give_up_ = std::move(give_up); }

 private:
  const std::shared_ptr<HttpExchange> exchange_;
  OpenAiFormatter formatter_;
  const std::string request_id_;
  const HeaderFn headers_;
  GiveUp give_up_;
  size_t collected_bytes_ = 0;  // approximate
};

}  // namespace spl::router
