#include "services/router/http/cors.h"

#include <algorithm>
#include <utility>

#include "services/base/status.h"

namespace spl::router {
namespace {

constexpr char kExposed[] =
    "x-request-id, request-id, x-splice-ignored, retry-after, traceparent, x-ratelimit-limit-requests, "
    "x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, "
    "x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens";
constexpr char kAllowedHeaders[] = "authorization, x-api-key, content-type";
constexpr size_t kMaxHeaderNames = 2048;

void Append(const HttpHeaders& more, HttpHeaders* headers) {
  headers->insert(headers->end(), more.begin(), more.end());
}

// "authorization, x-stainless-os": nothing that could end a header.
bool AreHeaderNames(const std::string& text) {
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == ',' || c == ' ';
  };
  return !text.empty() && text.size() <= kMaxHeaderNames && std::all_of(text.begin(), text.end(), fits);
}

class CorsExchange final : public HttpExchange {
 public:
  CorsExchange(std::shared_ptr<HttpExchange> exchange, HttpHeaders headers)
      : exchange_(std::move(exchange)), headers_(std::move(headers)) {}

  const HttpRequest& request() const override { return exchange_->request(); }
  std::string TakeBody() override { return exchange_->TakeBody(); }
  void Respond(HttpResponse response) override {
    Append(headers_, &response.headers);
    exchange_->Respond(std::move(response));
  }
  void StartStream(std::string content_type, HttpHeaders headers) override {
    Append(headers_, &headers);
    exchange_->StartStream(std::move(content_type), std::move(headers));
  }
  bool Write(std::string bytes) override { return exchange_->Write(std::move(bytes)); }
  void EndStream() override { exchange_->EndStream(); }
  void SetDrainCallback(std::function<void()> on_drained) override {
    exchange_->SetDrainCallback(std::move(on_drained));
  }
  void SetDisconnectCallback(std::function<void()> on_disconnect) override {
    exchange_->SetDisconnectCallback(std::move(on_disconnect));
  }

 private:
  const std::shared_ptr<HttpExchange> exchange_;
  const HttpHeaders headers_;
};

}  // namespace

absl::Status Cors::Check(const std::vector<std::string>& origins) {
  for (const std::string& origin : origins) {
    const size_t scheme = origin.find("://");
    const bool has_host = scheme != std::string::npos && scheme > 0 && scheme + 3 < origin.size() &&
                          origin.find('/', scheme + 3) == std::string::npos;
    const bool plain = std::all_of(origin.begin(), origin.end(), [](char c) { return c > ' ' && c < 0x7F; });
    if (origin == "*" || (has_host && plain)) continue;
    return InvalidArgument("--cors-origins: '{}' is neither * nor an origin like https://app.example:8443", origin);
  }
  return absl::OkStatus();
}

HttpHeaders Cors::HeadersFor(const std::string& origin) const {
  if (origins_.empty()) return {};
  const bool all = std::find(origins_.begin(), origins_.end(), "*") != origins_.end();
  HttpHeaders headers;
  if (!all) headers.emplace_back("vary", "origin");
  // One of the origins that the operator names is sent back, so that nothing of a request gets into a header.
  const auto named = std::find(origins_.begin(), origins_.end(), origin);
  if (origin.empty() || (!all && named == origins_.end())) return headers;
  headers.emplace_back("access-control-allow-origin", all ? "*" : *named);
  headers.emplace_back("access-control-expose-headers", kExposed);
  return headers;
}

std::optional<HttpResponse> Cors::Preflight(const HttpRequest& request) const {
  if (request.method != "OPTIONS" || request.origin.empty()) return std::nullopt;
  HttpResponse response{.status = 204, .headers = HeadersFor(request.origin)};
  if (response.headers.size() < 2) return std::nullopt;
  response.headers.emplace_back("access-control-allow-methods", "GET, POST, DELETE, OPTIONS");
  response.headers.emplace_back("access-control-allow-headers", AreHeaderNames(request.preflight_headers)
                                                                    ? request.preflight_headers
                                                                    : std::string(kAllowedHeaders));
  response.headers.emplace_back("access-control-max-age", "600");
  return response;
}

std::shared_ptr<HttpExchange> Cors::Wrap(std::shared_ptr<HttpExchange> exchange) const {
  HttpHeaders headers = HeadersFor(exchange->request().origin);
  if (headers.empty()) return exchange;
  return std::make_shared<CorsExchange>(std::move(exchange), std::move(headers));
}

}  // namespace spl::router
