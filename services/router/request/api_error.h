// Errors as clients see them. Every failure inside the router is an absl::Status. HTTP needs more than its code and
// message: the offending field, a symbolic code, the time to retry. These travel as status payloads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "services/base/field_error.h"
#include "services/base/status.h"

namespace spl::router {

absl::Status SetParam(absl::Status status, const std::string& param);
absl::Status SetErrorCode(absl::Status status, const std::string& code);
absl::Status SetRetryAfterMs(absl::Status status, uint32_t retry_after_ms);

std::string ParamOf(const absl::Status& status);      // "" if there is none
std::string ErrorCodeOf(const absl::Status& status);  // "" if there is none
std::optional<uint32_t> RetryAfterMsOf(const absl::Status& status);

// InvalidArgument "param: message", with the field's name as a payload.
template <typename... Args>
absl::Status ParamError(const std::string& param, fmt::format_string<Args...> format, Args&&... args) {
  return FieldError(param, fmt::format(format, std::forward<Args>(args)...));
}

// The HTTP status of a canonical code: 400, 401, 404, 409, 429, 499, 500, 503, 504.
int HttpStatusOf(absl::StatusCode code);
// The same, except 409 for a FailedPrecondition with an error code: it is about the state of an object that the caller
// named, not about the state of the cluster; and 501 for an Unimplemented with one: this server lacks a part.
int HttpStatusOf(const absl::Status& status);

// {"error":{"message","type","param","code"}}, as OpenAI clients read it.
std::string ErrorBody(const absl::Status& status, int http_status);
// {"type":"error","error":{"type","message"},"request_id"}, as Anthropic clients read it. Without an id the last member
// is null.
std::string AnthropicErrorBody(const absl::Status& status, int http_status, const std::string& request_id);

}  // namespace spl::router
