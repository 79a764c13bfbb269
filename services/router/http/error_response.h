// Errors and JSON as HTTP responses, in the shape of the API that a path belongs to.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "services/router/admission/rate_limits.h"
#include "services/router/http/http_server.h"
#include "services/router/request/answer_json.h"

namespace spl::router {

// True for Anthropic's API: "/v1/messages" and all paths below it.
bool IsMessagesPath(const std::string& path);

// The error object of the API that `path` belongs to; OpenAI's for all but Anthropic's.
std::string ErrorBodyFor(const std::string& path, const absl::Status& status, int http_status,
                         const std::string& request_id = "");
// That object with the matching HTTP status, and Retry-After if known.
HttpResponse ErrorResponse(const absl::Status& status, const std::string& request_id = "",
                           const RateLimits::Headers& headers = {}, const std::string& path = "");
// Sends ErrorResponse on the exchange, in the shape of its path.
void RespondError(HttpExchange& exchange, const absl::Status& status, const std::string& request_id,
                  const RateLimits::Headers& headers = {});
void RespondJson(HttpExchange& exchange, const OrderedJson& json, HttpHeaders headers = {});

// The headers that carry a request's id: x-request-id, and Anthropic's request-id.
HttpHeaders RequestIdHeaders(const std::string& path, const std::string& request_id);

}  // namespace spl::router
