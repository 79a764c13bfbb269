#include "tools/cli/api_client.h"

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

#include "services/base/status.h"
#include "services/base/tls_stream.h"
#include "tools/cli/http_url.h"

namespace spl::cli {
namespace {

namespace beast = boost::beast;
namespace http = beast::http;
using nlohmann::json;
using tcp = boost::asio::ip::tcp;

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
  HttpUrl url;
  std::string api_key;
  std::shared_ptr<const TlsTrust> trust;  // null: plain text
  boost::asio::io_context io;
  std::unique_ptr<TlsStream<tcp::socket>> stream;  // null: not connected
  beast::flat_buffer buffer;

  absl::Status Connect() {
    if (stream) return absl::OkStatus();
    beast::error_code error;
    tcp::resolver resolver(io);
    const auto found = resolver.resolve(url.host, url.port, error);
    if (error) return Errorf(absl::StatusCode::kUnavailable, "{}: {}", url.HostHeader(), error.message());
    auto fresh = std::make_unique<TlsStream<tcp::socket>>(io);
    boost::asio::connect(fresh->next_layer(), found, error);
    if (error)
      return Errorf(absl::StatusCode::kUnavailable, "cannot connect to {}: {}; is the server running?",
                    url.HostHeader(), error.message());
    fresh->next_layer().set_option(tcp::no_delay(true), error);
    if (trust != nullptr) SPLICE_RETURN_IF_ERROR(Handshake(*fresh));
    buffer.clear();
    stream = std::move(fresh);
    return absl::OkStatus();
  }

  absl::Status Handshake(TlsStream<tcp::socket>& fresh) {
    trust->Start(fresh, url.host);
    beast::error_code error;
    fresh.handshake(boost::asio::ssl::stream_base::client, error);
    if (!error) return absl::OkStatus();
    return Errorf(absl::StatusCode::kUnavailable, "https://{}: {}", url.HostHeader(),
                  trust->Explain(fresh.native_handle(), url.host, error));
  }

  http::request<http::string_body> MakeRequest(http::verb verb, const std::string& path, const std::string& body) {
    http::request<http::string_body> request{verb, url.base + path, 11};
    request.set(http::field::host, url.HostHeader());
    request.set(http::field::user_agent, "splice");
    if (!api_key.empty()) request.set(http::field::authorization, "Bearer " + api_key);
    if (!body.empty()) request.set(http::field::content_type, "application/json");
    request.body() = body;
    request.prepare_payload();
    return request;
  }

  absl::Status Lost(const beast::error_code& error) {
    stream.reset();
    return Errorf(absl::StatusCode::kUnavailable, "{}: connection lost: {}", url.HostHeader(), error.message());
  }

  absl::StatusOr<json> Exchange(http::verb verb, const std::string& path, const std::string& body) {
    // A kept connection may have been closed by the server meanwhile: then one more try on a fresh one.
    for (bool fresh = stream == nullptr;; fresh = true) {
      SPLICE_RETURN_IF_ERROR(Connect());
      beast::error_code error;
      http::write(*stream, MakeRequest(verb, path, body), error);
      http::response_parser<http::string_body> parser;
      parser.body_limit(kMaxReplyBytes);
      if (!error) http::read(*stream, buffer, parser, error);
      if (error && !fresh) {
        stream.reset();
        continue;
      }
      if (error) return Lost(error);
      const auto& response = parser.get();
      const std::string text = response.body();
      if (!response.keep_alive()) stream.reset();
      if (response.result_int() != 200) return ErrorOf(static_cast<int>(response.result_int()), text);
      json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
      if (root.is_discarded()) return absl::InternalError("the server's answer is not JSON");
      return root;
    }
  }
};

absl::StatusOr<std::unique_ptr<ApiClient>> ApiClient::Create(const Endpoint& endpoint) {
  auto url = ParseHttpUrl(endpoint.url);
  if (!url.ok()) return Annotate(url.status(), endpoint.flag);
  auto client = std::unique_ptr<ApiClient>(new ApiClient);
  client->impl_ = std::make_unique<Impl>();
  client->impl_->url = *std::move(url);
  client->impl_->api_key = endpoint.api_key;
  if (client->impl_->url.https) {
    SPLICE_ASSIGN_OR_RETURN(client->impl_->trust, TlsTrust::Load(kCaFlag, endpoint.ca_file));
  }
  return client;
}

ApiClient::~ApiClient() = default;

absl::StatusOr<json> ApiClient::Get(const std::string& path) { return impl_->Exchange(http::verb::get, path, ""); }

absl::StatusOr<json> ApiClient::Post(const std::string& path, const json& body) {
  return impl_->Exchange(http::verb::post, path, body.dump());
}

absl::StatusOr<json> ApiClient::Patch(const std::string& path, const json& body) {
  return impl_->Exchange(http::verb::patch, path, body.dump());
}

absl::StatusOr<json> ApiClient::Delete(const std::string& path) {
  return impl_->Exchange(http::verb::delete_, path, "");
}

absl::Status ApiClient::PostStream(const std::string& path, const json& body,
                                   const std::function<bool(const json&)>& on_event) {
  impl_->stream.reset();  // a stream that is given up closes its connection; it never shares one
  SPLICE_RETURN_IF_ERROR(impl_->Connect());
  auto& stream = *impl_->stream;
  beast::error_code error;
  http::write(stream, impl_->MakeRequest(http::verb::post, path, body.dump()), error);
  if (error) return impl_->Lost(error);
  http::response_parser<http::buffer_body> parser;
  parser.body_limit(kMaxReplyBytes);
  http::read_header(stream, impl_->buffer, parser, error);
  if (error) return impl_->Lost(error);
  const int status = static_cast<int>(parser.get().result_int());
  std::string text;
  char chunk[8192];
  while (!parser.is_done()) {
    parser.get().body().data = chunk;
    parser.get().body().size = sizeof(chunk);
    http::read_some(stream, impl_->buffer, parser, error);
    text.append(chunk, sizeof(chunk) - parser.get().body().size);
    if (error == http::error::need_buffer) error = {};
    if (error) return impl_->Lost(error);
    if (status != 200) continue;
    for (size_t end = text.find("\n\n"); end != std::string::npos; end = text.find("\n\n")) {
      const std::string event = text.substr(0, end);
      text.erase(0, end + 2);
      if (event.rfind("data: ", 0) != 0 || event == "data: [DONE]") continue;
      const json data = json::parse(event.substr(6), nullptr, /*allow_exceptions=*/false);
      if (data.is_discarded()) return absl::InternalError("an event of the stream is not JSON");
      if (data.is_object() && data.contains("error")) return ErrorOf(500, data.dump());
      if (!on_event(data)) {
        impl_->stream.reset();
        return absl::OkStatus();
      }
    }
  }
  impl_->stream.reset();
  return status == 200 ? absl::OkStatus() : ErrorOf(status, text);
}

}  // namespace spl::cli
