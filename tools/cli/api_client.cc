#include "tools/cli/api_client.h"

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

#include "services/base/address.h"
#include "services/base/status.h"

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
  HostPort address;
  std::string api_key;
  boost::asio::io_context io;
  std::unique_ptr<tcp::socket> socket;
  beast::flat_buffer buffer;

  absl::Status Connect() {
    if (socket) return absl::OkStatus();
    beast::error_code error;
    tcp::resolver resolver(io);
    const auto found = resolver.resolve(address.host, std::to_string(address.port), error);
    if (error) return Errorf(absl::StatusCode::kUnavailable, "{}: {}", address.ToString(), error.message());
    auto fresh = std::make_unique<tcp::socket>(io);
    boost::asio::connect(*fresh, found, error);
    if (error)
      return Errorf(absl::StatusCode::kUnavailable, "cannot connect to {}: {}; is the server running?",
                    address.ToString(), error.message());
    fresh->set_option(tcp::no_delay(true), error);
    buffer.clear();
    socket = std::move(fresh);
    return absl::OkStatus();
  }

  http::request<http::string_body> MakeRequest(http::verb verb, const std::string& path, const std::string& body) {
    http::request<http::string_body> request{verb, path, 11};
    request.set(http::field::host, address.ToString());
    request.set(http::field::user_agent, "splice");
    if (!api_key.empty()) request.set(http::field::authorization, "Bearer " + api_key);
    if (!body.empty()) request.set(http::field::content_type, "application/json");
    request.body() = body;
    request.prepare_payload();
    return request;
  }

  absl::Status Lost(const beast::error_code& error) {
    socket.reset();
    return Errorf(absl::StatusCode::kUnavailable, "{}: connection lost: {}", address.ToString(), error.message());
  }

  absl::StatusOr<json> Exchange(http::verb verb, const std::string& path, const std::string& body) {
    // A kept connection may have been closed by the server meanwhile: then one more try on a fresh one.
    for (bool fresh = socket == nullptr;; fresh = true) {
      SPLICE_RETURN_IF_ERROR(Connect());
      beast::error_code error;
      http::write(*socket, MakeRequest(verb, path, body), error);
      http::response_parser<http::string_body> parser;
      parser.body_limit(kMaxReplyBytes);
      if (!error) http::read(*socket, buffer, parser, error);
      if (error && !fresh) {
        socket.reset();
        continue;
      }
      if (error) return Lost(error);
      const auto& response = parser.get();
      const std::string text = response.body();
      if (!response.keep_alive()) socket.reset();
      if (response.result_int() != 200) return ErrorOf(static_cast<int>(response.result_int()), text);
      json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
      if (root.is_discarded()) return absl::InternalError("the server's answer is not JSON");
      return root;
    }
  }
};

absl::StatusOr<std::unique_ptr<ApiClient>> ApiClient::Create(const std::string& endpoint, std::string api_key,
                                                             const std::string& flag) {
  std::string text = endpoint;
  if (text.rfind("http://", 0) == 0) text = text.substr(7);
  if (text.find("://") != std::string::npos)
    return InvalidArgument("{} '{}': only http:// is supported", flag, endpoint);
  while (!text.empty() && text.back() == '/') text.pop_back();
  if (text.ends_with("/v1")) text.resize(text.size() - 3);
  auto address = ParseHostPort(text);
  if (!address.ok()) return Annotate(address.status(), flag);
  auto client = std::unique_ptr<ApiClient>(new ApiClient);
  client->impl_ = std::make_unique<Impl>();
  client->impl_->address = *address;
  client->impl_->api_key = std::move(api_key);
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
  impl_->socket.reset();  // a stream that is given up closes its connection; it never shares one
  SPLICE_RETURN_IF_ERROR(impl_->Connect());
  tcp::socket& socket = *impl_->socket;
  beast::error_code error;
  http::write(socket, impl_->MakeRequest(http::verb::post, path, body.dump()), error);
  if (error) return impl_->Lost(error);
  http::response_parser<http::buffer_body> parser;
  parser.body_limit(kMaxReplyBytes);
  http::read_header(socket, impl_->buffer, parser, error);
  if (error) return impl_->Lost(error);
  const int status = static_cast<int>(parser.get().result_int());
  std::string text;
  char chunk[8192];
  while (!parser.is_done()) {
    parser.get().body().data = chunk;
    parser.get().body().size = sizeof(chunk);
    http::read_some(socket, impl_->buffer, parser, error);
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
        impl_->socket.reset();
        return absl::OkStatus();
      }
    }
  }
  impl_->socket.reset();
  return status == 200 ? absl::OkStatus() : ErrorOf(status, text);
}

}  // namespace spl::cli
