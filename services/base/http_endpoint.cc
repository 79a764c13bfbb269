#include "services/base/http_endpoint.h"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <list>
#include <optional>
#include <thread>

#include "services/base/address.h"
#include "services/base/status.h"

namespace spl {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;

constexpr size_t kMaxConnections = 64;
constexpr size_t kMaxHeaderBytes = 8 << 10;
constexpr auto kIdleTimeout = std::chrono::seconds(10);

class Connection;

class BeastEndpoint final : public HttpEndpoint {
 public:
  explicit BeastEndpoint(Handlers handlers) : handlers_(std::move(handlers)), acceptor_(io_) {}
  ~BeastEndpoint() override { Stop(); }

  absl::Status Listen(const std::string& listen);
  std::string address() const override { return address_.ToString(); }
  void Stop() override;

  http::response<http::string_body> Answer(const http::request<http::empty_body>& request) const;
  void Remove(const std::shared_ptr<Connection>& connection) { connections_.remove(connection); }
  // The connection waits for its client from now on.
  void MoveToEnd(const std::shared_ptr<Connection>& connection);

 private:
  void Accept();

  const Handlers handlers_;
  asio::io_context io_{1};
  tcp::acceptor acceptor_;
  HostPort address_;
  // Touched by thread_ only. The first one has waited longest: all work is done at once, so every connection waits.
  std::list<std::shared_ptr<Connection>> connections_;
  std::thread thread_;
};

// One client. All its methods run on the endpoint's thread.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(tcp::socket socket, BeastEndpoint& endpoint) : stream_(std::move(socket)), endpoint_(endpoint) {}

  void Read() {
    parser_.emplace();
    parser_->header_limit(kMaxHeaderBytes);
    parser_->body_limit(0);
    stream_.expires_after(kIdleTimeout);
    http::async_read(stream_, buffer_, *parser_, [self = shared_from_this()](beast::error_code error, size_t) {
      if (error) return self->Close();
      self->Write();
    });
  }

  void Close() {
    beast::error_code ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_both, ignored);
    stream_.close();
    endpoint_.Remove(shared_from_this());
  }

 private:
  void Write() {
    response_ = endpoint_.Answer(parser_->get());
    stream_.expires_after(kIdleTimeout);
    const auto written = [self = shared_from_this()](beast::error_code error, size_t) {
      if (error || self->response_.need_eof()) return self->Close();
      self->endpoint_.MoveToEnd(self);
      self->Read();
    };
    if (parser_->get().method() != http::verb::head) {
      http::async_write(stream_, response_, written);
      return;
    }
    head_serializer_.emplace(response_);  // the header with the length of the body that GET would have
    http::async_write_header(stream_, *head_serializer_, written);
  }

  beast::tcp_stream stream_;
  BeastEndpoint& endpoint_;
  beast::flat_buffer buffer_{kMaxHeaderBytes + 1024};
  std::optional<http::request_parser<http::empty_body>> parser_;
  http::response<http::string_body> response_;
  std::optional<http::response_serializer<http::string_body>> head_serializer_;
};

absl::Status BeastEndpoint::Listen(const std::string& listen) {
  SPLICE_ASSIGN_OR_RETURN(address_, ParseHostPort(listen));
  beast::error_code error;
  tcp::resolver resolver(io_);
  const auto found = resolver.resolve(address_.host, std::to_string(address_.port), tcp::resolver::passive, error);
  if (error || found.empty()) {
    return Errorf(absl::StatusCode::kUnavailable, "cannot resolve '{}': {}", listen, error.message());
  }
  const tcp::endpoint endpoint = found.begin()->endpoint();
  acceptor_.open(endpoint.protocol(), error);
  if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
  if (!error) acceptor_.bind(endpoint, error);
  if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
  if (error) return Errorf(absl::StatusCode::kUnavailable, "cannot listen on '{}': {}", listen, error.message());
  address_.port = acceptor_.local_endpoint().port();
  Accept();
  thread_ = std::thread([this] { io_.run(); });
  return absl::OkStatus();
}

void BeastEndpoint::Accept() {
  acceptor_.async_accept([this](beast::error_code error, tcp::socket socket) {
    if (error == asio::error::operation_aborted) return;
    if (!error) {
      if (connections_.size() >= kMaxConnections) std::shared_ptr(connections_.front())->Close();
      const auto connection = std::make_shared<Connection>(std::move(socket), *this);
      connections_.push_back(connection);
      connection->Read();
    }
    Accept();
  });
}

void BeastEndpoint::MoveToEnd(const std::shared_ptr<Connection>& connection) {
  const auto at = std::find(connections_.begin(), connections_.end(), connection);
  if (at != connections_.end()) connections_.splice(connections_.end(), connections_, at);
}

void BeastEndpoint::Stop() {
  if (!thread_.joinable()) return;
  asio::post(io_, [this] {
    beast::error_code ignored;
    acceptor_.close(ignored);
    const auto open = connections_;
    for (const auto& connection : open) connection->Close();
  });
  thread_.join();  // run() returns when no operation is pending any more
}

http::response<http::string_body> BeastEndpoint::Answer(const http::request<http::empty_body>& request) const {
  HttpReply reply;
  const std::string target(request.target().data(), request.target().size());
  const auto found = handlers_.find(target.substr(0, target.find('?')));
  if (request.method() != http::verb::get && request.method() != http::verb::head) {
    reply = {405, "text/plain; charset=utf-8", "only GET and HEAD\n"};
  } else if (found == handlers_.end()) {
    reply = {404, "text/plain; charset=utf-8", "not found\n"};
  } else {
    reply = found->second();
  }
  http::response<http::string_body> response(static_cast<http::status>(reply.status), request.version());
  response.set(http::field::content_type, reply.content_type);
  response.set(http::field::cache_control, "no-store");
  response.keep_alive(request.keep_alive());
  response.body() = std::move(reply.body);
  response.prepare_payload();
  return response;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpEndpoint>> HttpEndpoint::Start(const std::string& listen, Handlers handlers) {
  auto endpoint = std::make_unique<BeastEndpoint>(std::move(handlers));
  SPLICE_RETURN_IF_ERROR(endpoint->Listen(listen));
  return endpoint;
}

}  // namespace spl
