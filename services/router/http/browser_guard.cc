#include "services/router/http/browser_guard.h"

#include <algorithm>
#include <utility>

#include "services/router/http/error_response.h"
#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

std::string Lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
  return out;
}

// "http://a:80" is of the origin of a request to host "a:80".
bool IsSameOrigin(const std::string& origin, const std::string& host) {
  const size_t scheme = origin.find("://");
  return scheme != std::string::npos && !host.empty() && Lower(origin.substr(scheme + 3)) == Lower(host);
}

// "application/json; charset=utf-8"
bool IsJson(const std::string& content_type) {
  std::string type = Lower(content_type.substr(0, content_type.find(';')));
  type.erase(type.find_last_not_of(" \t") + 1);
  return type == "application/json";
}

HttpResponse Forbidden(const char* message) { return ErrorResponse(absl::PermissionDeniedError(message)); }

}  // namespace

bool IsLoopbackHost(std::string_view host) {
  const size_t bracket = host.find(']');
  if (host.starts_with('[') && bracket != std::string_view::npos) return host.substr(0, bracket + 1) == "[::1]";
  const std::string name = Lower(host.substr(0, host.find(':')));
  const bool numeric = name.find_first_not_of("0123456789.") == std::string::npos;
  return name == "localhost" || (numeric && name.starts_with("127."));
}

std::optional<HttpResponse> RefuseBrowser(const HttpRequest& header, bool has_keys) {
  const std::string site = Lower(header.sec_fetch_site);
  const bool other_site = !site.empty() && site != "same-origin" && site != "none";
  if (other_site || (!header.origin.empty() && !IsSameOrigin(header.origin, header.host)))
    return Forbidden("web pages of other origins may not operate this cluster");
  const bool typed = !header.content_type.empty();
  if ((header.has_body || typed) && header.method != "GET" && !IsJson(header.content_type)) {
    const absl::Status wrong =
        InvalidArgument("content-type must be application/json, got \"{}\"", header.content_type);
    return HttpResponse{.status = 415, .body = ErrorBody(wrong, 415)};
  }
  if (has_keys) return std::nullopt;
  if (!IsLoopbackHost(header.host))
    return Forbidden("without --api-keys this is served to loopback only: call it by localhost or 127.0.0.1");
  if (header.forwarded)
    return Forbidden("without --api-keys this is not served through a proxy: give the router a file of keys");
  return std::nullopt;
}

std::optional<Refusal> RefuseOperation(const HttpRequest& header, bool has_keys,
                                       const std::function<absl::Status()>& authorize) {
  if (std::optional<HttpResponse> browser = RefuseBrowser(header, has_keys); browser.has_value()) {
    return Refusal{*std::move(browser),
                   absl::PermissionDeniedError("a web page of another origin, or a body that is not JSON")};
  }
  absl::Status status = authorize();
  if (status.ok()) return std::nullopt;
  HttpResponse response = ErrorResponse(status);
  return Refusal{std::move(response), std::move(status)};
}

}  // namespace spl::router
