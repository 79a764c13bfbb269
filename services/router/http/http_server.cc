#include "services/router/http/http_server.h"

#include <algorithm>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/strand.hpp>
#include <future>
#include <list>
#include <utility>

#include "services/base/address.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/router/http/http_connection.h"

namespace spl::router {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;

constexpr std::chrono::seconds kStopTimeout{5};

class BeastServer final : public HttpServer, public std::enable_shared_from_this<BeastServer> {
 public:
  BeastServer(asio::io_context& io, HttpServerOptions options, HttpHandler handler, HttpErrorBody error_body,
              HttpGate gate)
      : io_(io),
        strand_(asio::make_strand(io)),
        acceptor_(strand_),
        retry_(strand_),
        core_(std::make_shared<HttpServerCore>(std::move(options))) {
    core_->handler = std::move(handler);
    core_->error_body = std::move(error_body);
    core_->gate = std::move(gate);
  }

  absl::Status Listen() {
    SPLICE_ASSIGN_OR_RETURN(HostPort address, ParseHostPort(core_->options.listen));
    boost::system::error_code error;
    tcp::resolver resolver(io_);
    const auto found = resolver.resolve(address.host, std::to_string(address.port), error);
    if (error || found.empty()) {
      return Errorf(absl::StatusCode::kUnavailable, "cannot resolve '{}': {}", core_->options.listen, error.message());
    }
    const tcp::endpoint endpoint = found.begin()->endpoint();
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(1024, error);
    if (error) {
      return Errorf(absl::StatusCode::kUnavailable, "cannot serve HTTP on '{}': {}", core_->options.listen,
                    error.message());
    }
    address.port = acceptor_.local_endpoint().port();
    address_ = address.ToString();
    return absl::OkStatus();
  }

  void Run() {
    asio::post(strand_, [self = shared_from_this()] { self->Accept(); });
  }

  std::string address() const override { return address_; }

  void StopAccepting() override {
    core_->draining.store(true);
    OnStrand([](BeastServer& self) {
      boost::system::error_code ignored;
      self.acceptor_.close(ignored);
      self.retry_.cancel();
      for (const auto& weak : self.connections_) {
        if (const auto connection = weak.lock()) connection->CloseIfIdle();
      }
    });
  }

  size_t buffered_bytes() const override { return core_->waits->held_bytes(); }
  size_t TakePeakBytes() override { return core_->waits->TakePeakBytes(); }

  void FinishResponses(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(core_->mutex);
    core_->responded.wait_for(lock, timeout, [&] { return core_->num_responding == 0; });
  }

  void CloseAll() override {
    StopAccepting();
    OnStrand([](BeastServer& self) {
      for (const auto& weak : self.connections_) {
        if (const auto connection = weak.lock()) connection->Close();
      }
      self.connections_.clear();
    });
    // A connection whose request is unanswered owns itself through its exchange until its own strand has closed it.
    std::unique_lock lock(core_->mutex);
    core_->emptied.wait_for(lock, kStopTimeout, [&] { return core_->num_connections == 0; });
  }

 private:
  template <typename Function>
  void OnStrand(Function function) {
    const auto done = std::make_shared<std::promise<void>>();  // outlives a wait that was given up
    asio::post(strand_, [self = shared_from_this(), done, function] {
      function(*self);
      done->set_value();
    });
    done->get_future().wait_for(kStopTimeout);
  }

  void Accept() {
    acceptor_.async_accept(asio::make_strand(io_),
                           [self = shared_from_this()](const boost::system::error_code& error, tcp::socket socket) {
                             self->OnAccept(error, std::move(socket));
                           });
  }

  void OnAccept(const boost::system::error_code& error, tcp::socket socket) {
    if (!acceptor_.is_open()) return;
    if (error) {
      // Out of descriptors or memory: accepting again at once would only burn the processor.
      log::Warning("router.accept_failed", log::F("error", error.message()));
      retry_.expires_after(std::chrono::milliseconds(100));
      retry_.async_wait([self = shared_from_this()](const boost::system::error_code& cancelled) {
        if (!cancelled) self->Accept();
      });
      return;
    }
    Admit(std::move(socket));
    Accept();
  }

  void Admit(tcp::socket socket) {
    const bool at_limit = core_->num_connections.fetch_add(1) >= core_->options.max_connections;
    const bool full = at_limit && !core_->waits->EvictConnection();
    auto connection = std::make_shared<HttpConnection>(std::move(socket), core_);
    connections_.push_back(connection);
    if (++accepted_ % 256 == 0) connections_.remove_if([](const auto& weak) { return weak.expired(); });
    full ? connection->Refuse() : connection->Start();
  }

  asio::io_context& io_;
  asio::strand<asio::io_context::executor_type> strand_;
  tcp::acceptor acceptor_;
  asio::steady_timer retry_;
  const std::shared_ptr<HttpServerCore> core_;
  std::string address_;
  std::list<std::weak_ptr<HttpConnection>> connections_;  // strand_ only
  uint64_t accepted_ = 0;
};

// The acceptor's pending operation shares ownership; the caller's handle is plain.
class ServerHandle final : public HttpServer {
 public:
  explicit ServerHandle(std::shared_ptr<BeastServer> server) : server_(std::move(server)) {}
  std::string address() const override { return server_->address(); }
  void StopAccepting() override { server_->StopAccepting(); }
  void FinishResponses(std::chrono::milliseconds timeout) override { server_->FinishResponses(timeout); }
  size_t buffered_bytes() const override { return server_->buffered_bytes(); }
  size_t TakePeakBytes() override { return server_->TakePeakBytes(); }
  void CloseAll() override { server_->CloseAll(); }

 private:
  const std::shared_ptr<BeastServer> server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(asio::io_context& io, HttpServerOptions options,
                                                              HttpHandler handler, HttpErrorBody error_body,
                                                              HttpGate gate) {
  auto server =
      std::make_shared<BeastServer>(io, std::move(options), std::move(handler), std::move(error_body), std::move(gate));
  SPLICE_RETURN_IF_ERROR(server->Listen());
  server->Run();
  return std::make_unique<ServerHandle>(std::move(server));
}

}  // namespace spl::router
