#include "services/router/http/error_response.h"

#include <utility>

#include "services/router/request/api_error.h"

namespace spl::router {

bool IsMessagesPath(const std::string& path) {
  constexpr std::string_view kMessages = "/v1/messages";
  return path.starts_with(kMessages) && (path.size() == kMessages.size() || path[kMessages.size()] == '/');
}

std::string ErrorBodyFor(const std::string& path, const absl::Status& status, int http_status,
                         const std::string& request_id) {
  return IsMessagesPath(path) ? AnthropicErrorBody(status, http_status, request_id) : ErrorBody(status, http_status);
}

HttpResponse ErrorResponse(const absl::Status& status, const std::string& request_id,
                           const RateLimits::Headers& headers, const std::string& path) {
  HttpResponse response;
  response.headers = headers;
  response.status = HttpStatusOf(status);
  response.body = ErrorBodyFor(path, status, response.status, request_id);
  // Clients of OpenAI's library run a request again that took too long, and wait for it as long once more.
  if (response.status == 504) response.headers.emplace_back("x-should-retry", "false");
  for (auto& header : RequestIdHeaders(path, request_id)) response.headers.push_back(std::move(header));
  if (const auto retry_ms = RetryAfterMsOf(status)) {
    response.headers.emplace_back("retry-after", std::to_string((*retry_ms + 999) / 1000));
  }
  return response;
}

void RespondError(HttpExchange& exchange, const absl::Status& status, const std::string& request_id,
                  const RateLimits::Headers& headers) {
  exchange.Respond(ErrorResponse(status, request_id, headers, exchange.request().path));
}

void RespondJson(HttpExchange& exchange, const OrderedJson& json, HttpHeaders headers) {
  HttpResponse response;
  response.headers = std::move(headers);
  response.body = Dump(json);
  exchange.Respond(std::move(response));
}

HttpHeaders RequestIdHeaders(const std::string& path, const std::string& request_id) {
  if (request_id.empty()) return {};
  HttpHeaders headers = {{"x-request-id", request_id}};
  if (IsMessagesPath(path)) headers.emplace_back("request-id", request_id);
  return headers;
}

}  // namespace spl::router
