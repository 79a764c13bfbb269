#include "tools/cli/api_client.h"

#include <utility>

#include "services/base/http_client.h"
#include "services/base/status.h"
#include "tools/cli/api_url.h"

namespace spl::cli {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxReplyBytes = uint64_t{1} << 30;

absl::StatusCode CodeOf(int http_status) {
  switch (http_status) {
    case 400:
      return absl::StatusCode::kInvalidArgument;
    case 401:
      return absl::StatusCode::kUnauthenticated;
    case 404:
      return absl::StatusCode::kNotFound;
    case 409:
      return absl::StatusCode::kAborted;
    case 413:
    case 429:
      return absl::StatusCode::kResourceExhausted;
    case 501:
      return absl::StatusCode::kUnimplemented;
    case 503:
      return absl::StatusCode::kUnavailable;
    case 504:
      return absl::StatusCode::kDeadlineExceeded;
    default:
      return absl::StatusCode::kInternal;
  }
}

absl::Status ErrorOf(int http_status, const std::string& body) {
  const json root = json::parse(body, nullptr, /*allow_exceptions=*/false);
  std::string message = body.substr(0, 400);
  if (root.is_object() && root.contains("error") && root["error"].is_object() && root["error"].contains("message") &&
      root["error"]["message"].is_string())
    message = root["error"]["message"].get<std::string>();
  return Errorf(CodeOf(http_status), "HTTP {}: {}", http_status, message);
}

}  // namespace

struct ApiClient::Impl {
  std::string base, api_key;
  HttpClient http;

  HttpCall CallOf(const char* method, const std::string& path, const std::string& body) const {
    HttpCall call{.method = method, .target = base + path, .body = body};
    if (!api_key.empty()) call.headers.emplace_back("Authorization", "Bearer " + api_key);
    if (!body.empty()) call.headers.emplace_back("Content-Type", "application/json");
    return call;
  }

  absl::StatusOr<json> Exchange(const char* method, const std::string& path, const std::string& body) {
    SPLICE_ASSIGN_OR_RETURN(const HttpAnswer answer, http.Call(CallOf(method, path, body), kMaxReplyBytes));
    if (answer.status != 200) return ErrorOf(answer.status, answer.body);
    json root = json::parse(answer.body, nullptr, /*allow_exceptions=*/false);
    if (root.is_discarded()) return absl::InternalError("the server's answer is not JSON");
    return root;
  }
};

absl::StatusOr<std::unique_ptr<ApiClient>> ApiClient::Create(const Endpoint& endpoint) {
  auto url = ParseApiUrl(endpoint.url);
  if (!url.ok()) return Annotate(url.status(), endpoint.flag);
  HttpClientOptions options{.host = url->host,
                            .port = url->port,
                            .server = (url->https ? "https://" : "http://") + url->HostHeader(),
                            .keep_alive = true};
  if (url->https) {
    SPLICE_ASSIGN_OR_RETURN(options.trust, TlsTrust::Load(kCaFlag, endpoint.ca_file));
  }
  auto client = std::unique_ptr<ApiClient>(new ApiClient);
  client->impl_.reset(new Impl{url->path, endpoint.api_key, HttpClient(std::move(options))});
  return client;
}

ApiClient::~ApiClient() = default;

void ApiClient::Cancel() { impl_->http.Cancel(); }

absl::StatusOr<json> ApiClient::Get(const std::string& path) { return impl_->Exchange("GET", path, ""); }

absl::StatusOr<json> ApiClient::Post(const std::string& path, const json& body) {
  return impl_->Exchange("POST", path, body.dump());
}

absl::StatusOr<json> ApiClient::Patch(const std::string& path, const json& body) {
  return impl_->Exchange("PATCH", path, body.dump());
}

absl::StatusOr<json> ApiClient::Delete(const std::string& path) { return impl_->Exchange("DELETE", path, ""); }

absl::Status ApiClient::PostStream(const std::string& path, const json& body,
                                   const std::function<bool(const json&)>& on_event) {
  std::string text;
  absl::Status failed;
  const auto on_data = [&](int status, std::string_view piece) {
    text += piece;
    if (status != 200) return text.size() < kMaxReplyBytes;
    for (size_t end = text.find("\n\n"); end != std::string::npos; end = text.find("\n\n")) {
      const std::string event = text.substr(0, end);
      text.erase(0, end + 2);
      if (event.rfind("data: ", 0) != 0 || event == "data: [DONE]") continue;
      const json data = json::parse(event.substr(6), nullptr, /*allow_exceptions=*/false);
      if (data.is_discarded()) failed = absl::InternalError("an event of the stream is not JSON");
      if (data.is_object() && data.contains("error")) failed = ErrorOf(500, data.dump());
      if (!failed.ok() || !on_event(data)) return false;
    }
    return text.size() < kMaxReplyBytes;
  };
  SPLICE_ASSIGN_OR_RETURN(const int status, impl_->http.Exchange(impl_->CallOf("POST", path, body.dump()), on_data));
  SPLICE_RETURN_IF_ERROR(failed);
  return status == 200 ? absl::OkStatus() : ErrorOf(status, text);
}

}  // namespace spl::cli
