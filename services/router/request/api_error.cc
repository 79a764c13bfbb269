#include "services/router/request/api_error.h"

#include <nlohmann/json.hpp>

#include "absl/strings/cord.h"
#include "absl/types/optional.h"

namespace spl::router {
namespace {

constexpr char kRetryAfterUrl[] = "spl.v1/retry-after-ms";

std::string PayloadOf(const absl::Status& status, const char* url) {
  const absl::optional<absl::Cord> payload = status.GetPayload(url);
  return payload.has_value() ? std::string(*payload) : std::string();
}

const char* ErrorType(int http_status) {
  switch (http_status) {
    case 401:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 409:
      return "conflict_error";
    case 429:
      return "rate_limit_error";
    case 503:
      return "service_unavailable_error";
    case 504:
      return "timeout_error";
    default:
      return http_status < 500 ? "invalid_request_error" : "server_error";
  }
}

const char* AnthropicErrorType(int http_status) {
  switch (http_status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    case 504:
      return "timeout_error";
    default:
      return http_status < 500 ? "invalid_request_error" : "api_error";
  }
}

}  // namespace

absl::Status SetParam(absl::Status status, const std::string& param) {
  status.SetPayload(kFieldPayload, absl::Cord(param));
  return status;
}

absl::Status SetErrorCode(absl::Status status, const std::string& code) {
  status.SetPayload(kErrorCodePayload, absl::Cord(code));
  return status;
}

absl::Status SetRetryAfterMs(absl::Status status, uint32_t retry_after_ms) {
  status.SetPayload(kRetryAfterUrl, absl::Cord(std::to_string(retry_after_ms)));
  return status;
}

std::string ParamOf(const absl::Status& status) { return PayloadOf(status, kFieldPayload); }
std::string ErrorCodeOf(const absl::Status& status) { return PayloadOf(status, kErrorCodePayload); }

std::optional<uint32_t> RetryAfterMsOf(const absl::Status& status) {
  const std::string text = PayloadOf(status, kRetryAfterUrl);
  if (text.empty()) return std::nullopt;
  return static_cast<uint32_t>(std::stoul(text));
}

int HttpStatusOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return 200;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
      return 400;
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kAborted:
      return 409;
    case absl::StatusCode::kResourceExhausted:
      return 429;
    case absl::StatusCode::kCancelled:
      return 499;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kFailedPrecondition:
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

int HttpStatusOf(const absl::Status& status) {
  if (status.code() == absl::StatusCode::kUnimplemented && !ErrorCodeOf(status).empty()) return 501;
  const bool about_state = status.code() == absl::StatusCode::kFailedPrecondition && !ErrorCodeOf(status).empty();
  return about_state ? 409 : HttpStatusOf(status.code());
}

std::string ErrorBody(const absl::Status& status, int http_status) {
  nlohmann::ordered_json error;
  error["message"] = MessageOf(status);
  error["type"] = ErrorType(http_status);
  const std::string param = ParamOf(status);
  error["param"] = param.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(param);
  const std::string code = ErrorCodeOf(status);
  error["code"] = code.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(code);
  nlohmann::ordered_json body;
  body["error"] = std::move(error);
  return body.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string AnthropicErrorBody(const absl::Status& status, int http_status, const std::string& request_id) {
  nlohmann::ordered_json body;
  body["type"] = "error";
  body["error"] = {{"type", AnthropicErrorType(http_status)}, {"message", MessageOf(status)}};
  body["request_id"] = request_id.empty() ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(request_id);
  return body.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace spl::router
