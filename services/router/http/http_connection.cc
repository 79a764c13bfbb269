#include "services/router/http/http_connection.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/read.hpp>
#include <utility>

#include "services/base/log.h"
#include "services/base/status.h"
#include "services/router/http/http_tls.h"

namespace spl::router {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;

constexpr size_t kReadChunk = 8 << 10;
// What a client that was refused may still send before the connection is cut: closing with unread bytes resets the
// connection and can destroy the response on its way.
constexpr size_t kMaxLingerBytes = 64 << 20;
constexpr std::chrono::milliseconds kLingerTimeout{2'000};
constexpr char kTlsHandshakeRecord = 22;  // the first byte of every TLS connection

const char* ReasonPhrase(int status) {
  switch (status) {
    case 499:
      return "Client Closed Request";
    default: {
      const auto phrase = http::obsolete_reason(static_cast<http::status>(status));
      return phrase.data();  // a literal
    }
  }
}

// Header values come from us or were checked to hold no line ends.
std::string Head(int status, const std::string& content_type, const HttpHeaders& headers) {
  std::string head = fmt::format("HTTP/1.1 {} {}\r\ncontent-type: {}\r\n", status, ReasonPhrase(status), content_type);
  for (const auto& [name, value] : headers) head += fmt::format("{}: {}\r\n", name, value);
  return head;
}

std::string ToStd(boost::beast::string_view text) { return std::string(text.data(), text.size()); }

HttpRequest ToHttpRequest(http::request<http::string_body>&& message) {
  HttpRequest out;
  out.method = ToStd(message.method_string());
  const std::string target = ToStd(message.target());
  const size_t question = target.find('?');
  out.path = target.substr(0, question);
  if (question != std::string::npos) out.query = target.substr(question + 1);
  out.authorization = ToStd(message[http::field::authorization]);
  out.request_id = ToStd(message["x-request-id"]);
  out.traceparent = ToStd(message["traceparent"]);
  out.tracestate = ToStd(message["tracestate"]);
  out.timeout_ms = ToStd(message["x-request-timeout-ms"]);
  out.body = std::move(message.body());
  return out;
}

}  // namespace

// The handler's view of a response. Its own mutex guards what handler threads and the strand share.
class HttpConnection::Exchange final : public HttpExchange, public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(std::shared_ptr<HttpConnection> connection, HttpRequest request, bool keep_alive, bool chunked)
      : connection_(std::move(connection)), request_(std::move(request)), keep_alive_(keep_alive), chunked_(chunked) {}

  const HttpRequest& request() const override { return request_; }

  void Respond(HttpResponse response) override {
    std::string bytes = Head(response.status, response.content_type, response.headers);
    bytes += fmt::format("content-length: {}\r\nconnection: {}\r\n\r\n", response.body.size(), ConnectionHeader());
    bytes += response.body;
    Post(std::move(bytes), true);
  }

  void StartStream(std::string content_type, HttpHeaders headers) override {
    std::string bytes = Head(200, content_type, headers);
    if (chunked_) bytes += "transfer-encoding: chunked\r\n";
    bytes += fmt::format("connection: {}\r\n\r\n", chunked_ ? ConnectionHeader() : "close");
    Post(std::move(bytes), false);
  }

  bool Write(std::string bytes) override {
    if (bytes.empty()) return true;
    if (chunked_) {
      std::string frame = fmt::format("{:x}\r\n", bytes.size());
      frame.reserve(frame.size() + bytes.size() + 2);
      frame += bytes;
      frame += "\r\n";
      bytes = std::move(frame);
    }
    return Post(std::move(bytes), false);
  }

  void EndStream() override { Post(chunked_ ? "0\r\n\r\n" : "", true); }

  void SetDrainCallback(std::function<void()> on_drained) override {
    std::lock_guard lock(mutex_);
    on_drained_ = std::move(on_drained);
  }

  void SetDisconnectCallback(std::function<void()> on_disconnect) override {
    {
      std::lock_guard lock(mutex_);
      if (!gone_) {
        if (!ended_) on_disconnect_ = std::move(on_disconnect);
        return;
      }
    }
    on_disconnect();
  }

  // From the connection, on its strand.
  void OnSent(size_t num_bytes) {
    std::function<void()> drained;
    {
      std::lock_guard lock(mutex_);
      pending_bytes_ -= std::min(pending_bytes_, num_bytes);
      if (paused_ && pending_bytes_ == 0) {
        paused_ = false;
        drained = on_drained_;
      }
    }
    if (drained) drained();
  }
  // The response is complete or the client is gone; breaks the cycles that callbacks make.
  void Detach(bool gone) {
    std::function<void()> on_disconnect;
    std::function<void()> on_drained;
    {
      std::lock_guard lock(mutex_);
      on_disconnect.swap(on_disconnect_);
      on_drained.swap(on_drained_);
      connection_.reset();
      gone_ = gone_ || gone;
      ended_ = true;
    }
    if (gone && on_disconnect) on_disconnect();
  }

 private:
  const char* ConnectionHeader() const { return keep_alive_ ? "keep-alive" : "close"; }

  bool Post(std::string bytes, bool last) {
    std::shared_ptr<HttpConnection> connection;
    bool more = true;
    {
      std::lock_guard lock(mutex_);
      if (connection_ == nullptr || ended_) return true;
      connection = connection_;
      ended_ = last;
      pending_bytes_ += bytes.size();
      if (pending_bytes_ > connection->core_->options.max_pending_bytes) {
        paused_ = true;
        more = false;
      }
      // Posted under the lock: two writers' pieces then arrive in the order in which they were counted.
      asio::post(connection->stream_.get_executor(),
                 [connection, self = shared_from_this(), last, bytes = std::move(bytes)]() mutable {
                   if (connection->exchange_ == self) connection->Send(std::move(bytes), last);
                 });
    }
    return more;
  }

  std::mutex mutex_;  // guards all below that is not const
  std::shared_ptr<HttpConnection> connection_;
  const HttpRequest request_;
  const bool keep_alive_;
  const bool chunked_;
  std::function<void()> on_disconnect_;
  std::function<void()> on_drained_;
  size_t pending_bytes_ = 0;
  bool paused_ = false;
  bool ended_ = false;  // the last piece was handed over
  bool gone_ = false;
};

HttpConnection::HttpConnection(asio::ip::tcp::socket socket, std::shared_ptr<HttpServerCore> core)
    : stream_(std::move(socket)),
      core_(std::move(core)),
      read_timer_(stream_.get_executor()),
      write_timer_(stream_.get_executor()) {}

HttpConnection::~HttpConnection() { core_->num_connections.fetch_sub(1); }

void HttpConnection::Start() {
  asio::post(stream_.get_executor(), [self = shared_from_this()] {
    ErrorCode ignored;
    self->stream_.next_layer().set_option(asio::ip::tcp::no_delay(true), ignored);
    if (self->core_->options.tls == nullptr) return self->BeIdle();
    self->state_ = State::kHandshaking;
    self->stream_.next_layer().non_blocking(true, ignored);  // for the look at the first byte
    self->ArmReadTimer(self->core_->options.handshake_timeout);
    self->AwaitHello();
  });
}

void HttpConnection::Refuse() {
  asio::post(stream_.get_executor(), [self = shared_from_this()] {
    if (self->core_->options.tls != nullptr) return self->DoClose();
    self->state_ = State::kReading;
    self->Reject(503, "too many connections; try again later");
  });
}

void HttpConnection::Close() {
  asio::post(stream_.get_executor(), [self = shared_from_this()] { self->DoClose(); });
}

void HttpConnection::CloseIfIdle() {
  asio::post(stream_.get_executor(), [self = shared_from_this()] {
    if (self->state_ == State::kHandshaking) self->DoClose();
    if (self->state_ == State::kIdle) self->CloseIdle();
  });
}

// ---- TLS

void HttpConnection::AwaitHello() {
  stream_.next_layer().async_wait(asio::ip::tcp::socket::wait_read,
                                  [self = shared_from_this()](const ErrorCode& error) { self->OnHello(error); });
}

void HttpConnection::OnHello(const ErrorCode& error) {
  if (state_ == State::kClosed) return;
  if (error) return DoClose();
  char first = 0;
  ErrorCode peeked;
  stream_.next_layer().receive(asio::buffer(&first, 1), asio::ip::tcp::socket::message_peek, peeked);
  if (peeked == asio::error::would_block) return AwaitHello();
  if (peeked) return DoClose();  // gone without a word: a port that was looked at
  if (first != kTlsHandshakeRecord) return RefusePlainText(first);
  stream_.StartTls(*core_->options.tls->context());
  stream_.async_handshake(asio::ssl::stream_base::server,
                          [self = shared_from_this()](const ErrorCode& done) { self->OnHandshake(done); });
}

void HttpConnection::OnHandshake(const ErrorCode& error) {
  if (state_ == State::kClosed) return;
  core_->OnHandshake(error ? HandshakeResult::kFailed : HandshakeResult::kOk);
  if (!error) return BeIdle();
  log::Debug("router.tls_handshake_failed", log::F("error", error.message()));
  DoClose();
}

// The stream is still plain text, and so is the answer; to what may be a request only.
void HttpConnection::RefusePlainText(char first) {
  const bool request = first >= 'A' && first <= 'Z';
  core_->OnHandshake(request ? HandshakeResult::kPlainText : HandshakeResult::kFailed);
  if (!request) return DoClose();
  state_ = State::kReading;
  Reject(400,
         "this port speaks TLS: use https:// (what was sent, with the API key if there was one, went unencrypted)");
}

void HttpConnection::BeIdle() {
  state_ = State::kIdle;
  ArmReadTimer(core_->options.idle_timeout);
  Watch();
}

// ---- reading

// Between requests, and while a response is under way.
void HttpConnection::Watch() {
  if (watching_ || state_ == State::kClosed) return;
  watching_ = true;
  stream_.async_read_some(buffer_.prepare(kReadChunk),
                          [self = shared_from_this()](const ErrorCode& error, size_t n) { self->OnWatched(error, n); });
}

void HttpConnection::OnWatched(const ErrorCode& error, size_t num_bytes) {
  watching_ = false;
  if (state_ == State::kClosed) return;
  if (state_ == State::kLingering && stream_.is_tls()) return CloseNotify();
  if (error == asio::error::operation_aborted && state_ == State::kIdle) return ReadRequest();  // see OnResponseDone
  if (error) return state_ == State::kResponding ? Disconnected() : DoClose();
  buffer_.commit(num_bytes);
  if (state_ == State::kIdle) return ReadRequest();
  // A pipelined request: it waits for its turn. Up to one header's worth is kept; further bytes wait in the kernel.
  if (state_ == State::kResponding && buffer_.size() < core_->options.max_header_bytes) Watch();
}

void HttpConnection::ReadRequest() {
  state_ = State::kReading;
  parser_.emplace();
  parser_->header_limit(static_cast<uint32_t>(core_->options.max_header_bytes));
  parser_->body_limit(core_->options.max_body_bytes);
  ArmReadTimer(core_->options.read_timeout);
  http::async_read_header(stream_, buffer_, *parser_,
                          [self = shared_from_this()](const ErrorCode& error, size_t) { self->OnHeader(error); });
}

void HttpConnection::OnHeader(const ErrorCode& error) {
  if (state_ == State::kClosed) return;
  if (error) return OnReadError(error);
  keep_alive_ = parser_->get().keep_alive() && !core_->draining.load();
  chunked_ = parser_->get().version() >= 11;
  const auto expect = parser_->get()[http::field::expect];
  if (boost::beast::iequals(expect, "100-continue")) return ContinueThenReadBody();
  ReadBody();
}

void HttpConnection::ContinueThenReadBody() {
  static const std::string kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
  asio::async_write(stream_, asio::buffer(kContinue), [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (error) return self->DoClose();
    if (self->state_ != State::kClosed) self->ReadBody();
  });
}

void HttpConnection::ReadBody() {
  http::async_read(stream_, buffer_, *parser_,
                   [self = shared_from_this()](const ErrorCode& error, size_t) { self->OnRequest(error); });
}

void HttpConnection::OnRequest(const ErrorCode& error) {
  if (state_ == State::kClosed) return;
  if (error) return OnReadError(error);
  read_timer_.cancel();
  state_ = State::kResponding;
  close_after_response_ = !keep_alive_;
  core_->AddResponding(1);
  exchange_ = std::make_shared<Exchange>(shared_from_this(), ToHttpRequest(parser_->release()), keep_alive_, chunked_);
  parser_.reset();
  if (buffer_.size() < core_->options.max_header_bytes) Watch();
  core_->handler(exchange_);
}

void HttpConnection::OnReadError(const ErrorCode& error) {
  if (error == http::error::body_limit) {
    return Reject(413, fmt::format("the body is larger than {} bytes", core_->options.max_body_bytes));
  }
  if (error == http::error::header_limit || error == http::error::buffer_overflow) {
    return Reject(431, fmt::format("the header is larger than {} bytes", core_->options.max_header_bytes));
  }
  const bool closed = error == http::error::end_of_stream || error == http::error::partial_message;
  if (closed || error.category() != http::make_error_code(http::error::end_of_stream).category()) return DoClose();
  Reject(400, "the request is not valid HTTP: " + error.message());
}

// Answers outside of any exchange and closes: what follows in the input cannot be trusted, or is not wanted.
void HttpConnection::Reject(int status, const std::string& message) {
  read_timer_.cancel();
  close_after_response_ = true;
  const std::string body = core_->error_body(status, message);
  std::string bytes = Head(status, "application/json", {});
  bytes += fmt::format("content-length: {}\r\nconnection: close\r\n\r\n{}", body.size(), body);
  state_ = State::kResponding;
  Send(std::move(bytes), true);
}

// ---- writing

void HttpConnection::Send(std::string bytes, bool last) {
  if (state_ != State::kResponding) return;
  queued_ += bytes;
  last_queued_ = last_queued_ || last;
  if (!writing_) WriteNext();
}

void HttpConnection::WriteNext() {
  if (queued_.empty()) {
    if (last_queued_) OnResponseDone();
    return;
  }
  writing_ = true;
  in_flight_.clear();
  in_flight_.swap(queued_);
  ArmWriteTimer();
  asio::async_write(stream_, asio::buffer(in_flight_),
                    [self = shared_from_this()](const ErrorCode& error, size_t) { self->OnWritten(error); });
}

void HttpConnection::OnWritten(const ErrorCode& error) {
  writing_ = false;
  write_timer_.cancel();
  if (state_ == State::kClosed) return;
  if (error) return Disconnected();
  if (exchange_ != nullptr) exchange_->OnSent(in_flight_.size());
  WriteNext();
}

void HttpConnection::OnResponseDone() {
  last_queued_ = false;
  if (exchange_ != nullptr) {
    exchange_->Detach(false);
    exchange_.reset();
    core_->AddResponding(-1);
  }
  if (close_after_response_ || !chunked_ || core_->draining.load()) return Linger();
  state_ = State::kIdle;
  ArmReadTimer(core_->options.idle_timeout);
  if (buffer_.size() == 0) return Watch();  // or the read that is pending already
  if (!watching_) return ReadRequest();
  // A pipelined request is here already: the pending read ends and makes way for it.
  ErrorCode ignored;
  stream_.next_layer().cancel(ignored);
}

// ---- timers and the end

void HttpConnection::ArmReadTimer(std::chrono::milliseconds timeout) {
  read_timer_.expires_after(timeout);
  read_timer_.async_wait([weak = weak_from_this()](const ErrorCode& error) {
    const auto self = weak.lock();
    // A timer that was re-armed after this handler was queued has not expired.
    if (error || self == nullptr || self->read_timer_.expiry() > std::chrono::steady_clock::now()) return;
    self->OnReadTimeout();
  });
}

void HttpConnection::OnReadTimeout() {
  if (state_ == State::kResponding || state_ == State::kClosed) return;
  if (state_ == State::kIdle) return CloseIdle();
  if (state_ == State::kHandshaking) core_->OnHandshake(HandshakeResult::kTimeout);
  DoClose();
}

void HttpConnection::ArmWriteTimer() {
  write_timer_.expires_after(core_->options.write_timeout);
  write_timer_.async_wait([weak = weak_from_this()](const ErrorCode& error) {
    const auto self = weak.lock();
    if (error || self == nullptr || !self->writing_ || self->write_timer_.expiry() > std::chrono::steady_clock::now()) {
      return;
    }
    self->Disconnected();
  });
}

void HttpConnection::CloseIdle() { stream_.is_tls() ? Linger() : DoClose(); }

// Sends the end of the response and reads what the client still sends, a bounded while, before the socket is closed.
void HttpConnection::Linger() {
  state_ = State::kLingering;
  ArmReadTimer(kLingerTimeout);
  ErrorCode ignored;
  if (!stream_.is_tls()) {
    stream_.next_layer().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
    if (!watching_) LingerRead();
    return;
  }
  if (!watching_) return CloseNotify();
  stream_.next_layer().cancel(ignored);  // the end of TLS and a read do not go together
}

// The end of TLS: the client then knows that nothing was cut off.
void HttpConnection::CloseNotify() {
  stream_.async_shutdown([self = shared_from_this()](const ErrorCode& error) {
    if (self->state_ != State::kLingering) return;
    if (!error) return self->DoClose();
    // Instead of its own end the client sends more, or has closed: read on, past TLS.
    ErrorCode ignored;
    self->stream_.next_layer().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
    self->LingerRead();
  });
}

void HttpConnection::LingerRead() {
  buffer_.clear();
  stream_.next_layer().async_read_some(
      buffer_.prepare(kReadChunk), [self = shared_from_this()](const ErrorCode& error, size_t n) {
        self->lingered_bytes_ += n;
        if (error || self->lingered_bytes_ > kMaxLingerBytes || self->state_ != State::kLingering)
          return self->DoClose();
        self->LingerRead();
      });
}

void HttpConnection::Disconnected() {
  const std::shared_ptr<Exchange> exchange = std::move(exchange_);
  exchange_ = nullptr;
  DoClose();
  if (exchange == nullptr) return;
  core_->AddResponding(-1);
  exchange->Detach(true);
}

void HttpConnection::DoClose() {
  if (exchange_ != nullptr) return Disconnected();
  state_ = State::kClosed;
  read_timer_.cancel();
  write_timer_.cancel();
  ErrorCode ignored;
  stream_.next_layer().shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
  stream_.next_layer().close(ignored);
}

}  // namespace spl::router
