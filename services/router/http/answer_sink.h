// A generation's output as an HTTP response: server-sent events or one JSON object.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "services/router/admission/rate_limits.h"
#include "services/router/http/http_server.h"
#include "services/router/request/answer_formatter.h"
#include "services/router/request/field_names.h"

namespace spl::router {

// Returns the caller's rate-limit headers at the start of the response.
using HeaderFn = std::function<RateLimits::Headers()>;

// Where an answer goes, and its shape.
struct Reply {
  std::shared_ptr<HttpExchange> exchange;
  std::unique_ptr<AnswerFormatter> formatter;
  std::string request_id;
  HeaderFn headers;
  FieldNames names;  // for errors
};

// Sends one event per output. The response starts with the first one, so that earlier failures get their own HTTP
// status.
class StreamSink final : public GenerationSink {
 public:
  explicit StreamSink(Reply reply) : reply_(std::move(reply)) {}

  void OnPrompt(uint32_t num_tokens, std::span<const TokenId> prompt) override {
    reply_.formatter->SetPrompt(num_tokens, prompt);
  }
  bool OnOutput(std::span<const Delta> deltas, const FinalInfo* final) override;
  void OnError(const absl::Status& status) override;

 private:
  const Reply reply_;
  bool started_ = false;
};

// Sends the whole answer at the end. If it takes more memory than kMaxWholeBytes, `give_up` ends the generation with
// the reason.
class WholeSink final : public GenerationSink {
 public:
  static constexpr size_t kMaxWholeBytes = 32 << 20;
  using GiveUp = std::function<void(const absl::Status&)>;

  explicit WholeSink(Reply reply) : reply_(std::move(reply)) {}

  void OnPrompt(uint32_t num_tokens, std::span<const TokenId> prompt) override {
    reply_.formatter->SetPrompt(num_tokens, prompt);
  }
  bool OnOutput(std::span<const Delta> deltas, const FinalInfo* final) override;
  void OnError(const absl::Status& status) override;
  // Call before the first output.
  void SetGiveUp(GiveUp give_up) { give_up_ = std::move(give_up); }

 private:
  const Reply reply_;
  GiveUp give_up_;
  size_t collected_bytes_ = 0;  // approximate
};

}  // namespace spl::router
