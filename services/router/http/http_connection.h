// One client connection. Internal to the HTTP server.
#pragma once

#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "services/base/tls_stream.h"
#include "services/router/http/client_waits.h"
#include "services/router/http/http_header.h"
#include "services/router/http/http_server.h"

namespace spl::router {

struct HttpServerCore {
  explicit HttpServerCore(HttpServerOptions given)
      : options(std::move(given)),
        waits(std::make_shared<ClientWaits>(options.max_buffered_bytes, options.eviction_age)) {}

  const HttpServerOptions options;
  HttpHandler handler;
  HttpErrorBody error_body;
  HttpGate gate;
  const std::shared_ptr<ClientWaits> waits;
  std::atomic<size_t> num_connections{0};
  std::atomic<bool> draining{false};  // idle connections close, responses say "connection: close"
  std::mutex mutex;                   // guards num_responding
  std::condition_variable responded;  // num_responding is 0
  std::condition_variable emptied;    // num_connections is 0
  size_t num_responding = 0;          // requests that were read and whose response is not completely sent

  void AddResponding(int change) {
    std::lock_guard lock(mutex);
    num_responding += static_cast<size_t>(change);
    if (num_responding == 0) responded.notify_all();
  }
  void RemoveConnection() {
    std::lock_guard lock(mutex);
    if (num_connections.fetch_sub(1) == 1) emptied.notify_all();
  }
  void OnHandshake(HandshakeResult result) const {
    if (options.on_handshake) options.on_handshake(result);
  }
};

struct ResponseForm {
  bool keep_alive = false;
  bool chunked = false;  // a body of unknown length comes in chunks; otherwise the connection's end is its end
  bool head = false;     // true: no body follows
};

// All state is touched on the socket's strand only, except the state that the exchange shares (see Exchange). Keeps
// itself alive while an operation is pending.
//
// While a response is being sent, one read stays pending: it notices a client that leaves at once. The bytes that it
// reads (a pipelined request) are kept for later.
//
// With TLS a connection waits for the client's first byte, which distinguishes a handshake from a plain-text request,
// then for the handshake; handshake_timeout limits both. Ends that the server chooses are announced (close_notify).
class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
 public:
  HttpConnection(boost::asio::ip::tcp::socket socket, std::shared_ptr<HttpServerCore> core);
  ~HttpConnection();

  void Start();
  // Answers 503 for lack of room, then closes; with TLS no handshake is spent on it.
  void Refuse();
  void Close();                        // posts
  void Evict(ClientWaits::Need need);  // posts
  void CloseIfIdle();                  // posts; used while the core drains

 private:
  class Exchange;
  friend class Exchange;
  using ErrorCode = boost::system::error_code;
  enum class State { kHandshaking, kIdle, kReading, kResponding, kLingering, kClosed };

  void AwaitHello();
  void OnHello(const ErrorCode& error);
  void OnHandshake(const ErrorCode& error);
  void RefusePlainText(char first);
  void BeIdle();

  void ReadRequest();
  void OnHeader(const ErrorCode& error);
  void ContinueThenReadBody();
  void ReadBody();
  void OnBodyPiece(const ErrorCode& error, size_t num_bytes);
  void ParseBody();
  void OnRequest();
  void OnReadError(const ErrorCode& error);
  void Reject(int status, const std::string& message);
  void Answer(const HttpResponse& response, bool keep_alive);
  void JoinWaits();
  void OnEvicted(ClientWaits::Need need);
  std::string ErrorBody(int status, const std::string& message) const {
    return core_->error_body(status, message, PathOf(parser_));
  }
  HttpResponse NoRoom(const std::string& why) const;
  ResponseForm form() const { return {.keep_alive = keep_alive_, .chunked = chunked_, .head = head_}; }

  void Watch();
  void OnWatched(const ErrorCode& error, size_t num_bytes);

  // Called by the exchange, on the strand.
  void Send(std::string bytes, bool last);
  void WriteNext();
  void OnWritten(const ErrorCode& error);
  void OnResponseDone();

  void ArmReadTimer(std::chrono::milliseconds timeout);
  void ArmWriteTimer();
  void OnReadTimeout();
  void CloseIdle();
  void Linger();
  void CloseNotify();
  void LingerRead();
  void Disconnected();
  void DoClose();

  TlsStream<boost::asio::ip::tcp::socket> stream_;
  const std::shared_ptr<HttpServerCore> core_;
  boost::asio::steady_timer read_timer_;
  boost::asio::steady_timer write_timer_;
  boost::beast::flat_buffer buffer_;             // bounded: everything that the parser wants in one piece must fit
  std::unique_ptr<ClientWaits::Client> client_;  // set by Start and Refuse
  size_t wire_bytes_ = 0;                        // bytes of the body being read, framing included
  size_t held_body_bytes_ = 0;                   // counted bytes of the body being read
  std::optional<boost::beast::http::request_parser<boost::beast::http::string_body>> parser_;
  std::shared_ptr<Exchange> exchange_;
  State state_ = State::kIdle;
  bool evicted_ = false;  // while waiting for the rest of a request, which gets 503
  bool head_ = false;     // the request is HEAD
  bool keep_alive_ = true;
  bool chunked_ = true;    // false for HTTP/1.0: the end of the connection ends the stream
  bool watching_ = false;  // the watching read is pending
  bool writing_ = false;
  bool last_queued_ = false;  // the response is complete once the queue is empty
  bool close_after_response_ = false;
  std::string queued_;  // to be written next; limited by the exchange's back-pressure
  std::string in_flight_;
  size_t lingered_bytes_ = 0;
};

}  // namespace spl::router
