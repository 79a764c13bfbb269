#include "services/router/http/http_connection.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/read.hpp>
#include <utility>

#include "services/base/log.h"
#include "services/base/status.h"
#include "services/router/http/http_header.h"
#include "services/router/http/http_tls.h"

namespace spl::router {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;

constexpr size_t kReadChunk = 8 << 10;
// Besides a header: the pieces in which a body is read, or a chunk's size with its extension, or all trailers.
constexpr size_t kMaxPiece = 16 << 10;
// Bytes of a chunked body in all, for each byte of content and besides: a chunk of one byte takes six.
constexpr size_t kFramingPerByte = 8, kFramingBesides = 64 << 10;
// Bytes of a body or an answer that are never refused: the number of connections limits them.
constexpr size_t kSmall = 16 << 10;
// Bytes that a refused client may still send before the connection is cut: closing with unread bytes resets the
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

std::string WholeResponse(const HttpResponse& response, const ResponseForm& form) {
  std::string bytes = Head(response.status, response.content_type, response.headers);
  bytes += fmt::format("content-length: {}\r\nconnection: {}\r\n\r\n", response.body.size(),
                       form.keep_alive ? "keep-alive" : "close");
  if (!form.head && response.status != 304) bytes += response.body;  // 304 names the length of what it stands for
  return bytes;
}

size_t CountedBytes(size_t body_bytes) { return body_bytes - std::min(body_bytes, kSmall); }

}  // namespace

// The handler's view of a response. Its own mutex guards the state that handler threads and the strand share.
class HttpConnection::Exchange final : public HttpExchange, public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(std::shared_ptr<HttpConnection> connection, HttpRequest request, ResponseForm form)
      : connection_(std::move(connection)), request_(std::move(request)), form_(form), chunked_(form.chunked) {}

  const HttpRequest& request() const override { return request_; }

  std::string TakeBody() override {
    std::lock_guard lock(mutex_);
    std::string body = std::exchange(request_.body, {});
    if (connection_ != nullptr) connection_->client_->Drop(CountedBytes(body.size()));
    return body;
  }

  void Respond(HttpResponse response) override {
    const size_t size = response.body.size();
    Post(WholeResponse(response, form_), true, size);
  }

  void StartStream(std::string content_type, HttpHeaders headers) override {
    std::string bytes = Head(200, content_type, headers);
    if (chunked_) bytes += "transfer-encoding: chunked\r\n";
    bytes += fmt::format("connection: {}\r\n\r\n", chunked_ && form_.keep_alive ? "keep-alive" : "close");
    Post(std::move(bytes), form_.head);
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
  // `whole_size`: of the body of a response that is sent in one piece and may be refused for want of room.
  bool Post(std::string bytes, bool last, size_t whole_size = 0) {
    std::shared_ptr<HttpConnection> connection;
    bool more = true;
    {
      std::lock_guard lock(mutex_);
      if (connection_ == nullptr || ended_) return true;
      connection = connection_;
      ended_ = last;
      ClientWaits::Client& client = *connection->client_;
      if (whole_size <= kSmall) {
        client.HoldAnyway(bytes.size());
      } else if (!client.Hold(bytes.size())) {
        bytes = WholeResponse(connection->NoRoom("the answer does not fit into what the router may hold"), form_);
        client.HoldAnyway(bytes.size());
      }
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
  HttpRequest request_;  // the body changes, once (TakeBody); the rest never
  const ResponseForm form_;
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
      write_timer_(stream_.get_executor()),
      buffer_(core_->options.max_header_bytes + kMaxPiece) {}

HttpConnection::~HttpConnection() { core_->RemoveConnection(); }

// Weak: the table's entry lives in the connection.
void HttpConnection::JoinWaits() {
  client_ = std::make_unique<ClientWaits::Client>(core_->waits, [weak = weak_from_this()](ClientWaits::Need need) {
    if (const auto self = weak.lock()) self->Evict(need);
  });
}

void HttpConnection::Start() {
  JoinWaits();
  asio::post(stream_.get_executor(), [self = shared_from_this()] {
    ErrorCode ignored;
    self->stream_.next_layer().set_option(asio::ip::tcp::no_delay(true), ignored);
    if (self->core_->options.tls == nullptr) return self->BeIdle();
    self->state_ = State::kHandshaking;
    self->client_->WaitFor(ClientWaits::Wait::kRequest);
    self->stream_.next_layer().non_blocking(true, ignored);  // for the look at the first byte
    self->ArmReadTimer(self->core_->options.handshake_timeout);
    self->AwaitHello();
  });
}

void HttpConnection::Refuse() {
  JoinWaits();
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

void HttpConnection::Evict(ClientWaits::Need need) {
  asio::post(stream_.get_executor(), [self = shared_from_this(), need] { self->OnEvicted(need); });
}

// The client may have moved on meanwhile, and then stays.
void HttpConnection::OnEvicted(ClientWaits::Need need) {
  const bool reading = state_ == State::kReading || state_ == State::kHandshaking;
  if (need == ClientWaits::Need::kConnection) {
    if (reading || state_ == State::kIdle) DoClose();
    return;
  }
  if (state_ == State::kResponding && writing_) return Disconnected();
  if (state_ != State::kReading) return;
  evicted_ = true;  // the read that is pending ends, and OnBodyPiece answers
  ErrorCode ignored;
  stream_.next_layer().cancel(ignored);
}

HttpResponse HttpConnection::NoRoom(const std::string& why) const {
  return {.status = 503, .body = ErrorBody(503, why + "; try again later"), .headers = {{"retry-after", "1"}}};
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

// Answers in plain text, since the stream is still plain; only to bytes that may be a request.
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
  client_->WaitFor(ClientWaits::Wait::kIdle);
  ArmReadTimer(core_->options.idle_timeout);
  Watch();
}

// ---- reading

// Reads between requests, and while a response is being sent.
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
  client_->WaitFor(ClientWaits::Wait::kRequest);
  wire_bytes_ = held_body_bytes_ = 0;
  evicted_ = head_ = false;
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
  head_ = parser_->get().method() == http::verb::head;
  if (!KnowsTransferCoding(parser_->get())) return Reject(501, "of transfer codings only \"chunked\" is understood");
  if (HasContentCoding(parser_->get())) return Reject(415, "bodies are read as they are, without a content-encoding");
  if (core_->gate) {
    HttpRequest header = HeaderOf(parser_->get());
    header.has_body = HasBody(*parser_);
    // The connection ends where an unread body would follow.
    const std::optional<HttpResponse> refusal = core_->gate(header);
    if (refusal.has_value()) return Answer(*refusal, keep_alive_ && !header.has_body);
  }
  const auto expect = parser_->get()[http::field::expect];
  if (boost::beast::iequals(expect, "100-continue")) return ContinueThenReadBody();
  ParseBody();
}

void HttpConnection::ContinueThenReadBody() {
  static const std::string kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
  asio::async_write(stream_, asio::buffer(kContinue), [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (error) return self->DoClose();
    if (self->state_ != State::kClosed) self->ParseBody();
  });
}

// Not by http::async_read_some: that goes on by itself while chunk headers are cut in two, and nothing would be
// counted.
void HttpConnection::ReadBody() {
  if (parser_->is_done()) return OnRequest();
  const size_t room = std::min(kMaxPiece, buffer_.max_size() - buffer_.size());
  if (room == 0) return OnReadError(http::error::buffer_overflow);
  stream_.async_read_some(buffer_.prepare(room), [self = shared_from_this()](const ErrorCode& error, size_t n) {
    self->OnBodyPiece(error, n);
  });
}

void HttpConnection::OnBodyPiece(const ErrorCode& error, size_t num_bytes) {
  if (state_ != State::kReading) return;
  if (evicted_) return Answer(NoRoom("the request took too long to come, and its room is needed"), false);
  if (error) return OnReadError(error);
  buffer_.commit(num_bytes);
  wire_bytes_ += num_bytes;
  ParseBody();
}

void HttpConnection::ParseBody() {
  parser_->eager(true);
  ErrorCode parsed;
  if (!parser_->is_done() && buffer_.size() > 0) buffer_.consume(parser_->put(buffer_.data(), parsed));
  if (parsed && parsed != http::error::need_more) return OnReadError(parsed);
  const size_t body_bytes = parser_->get().body().size();
  if (wire_bytes_ > kFramingPerByte * body_bytes + kFramingBesides)
    return Reject(400, "the body consists of chunk headers mostly");
  const size_t counted = CountedBytes(body_bytes);
  if (counted > held_body_bytes_ && !client_->Hold(counted - held_body_bytes_))
    return Answer(NoRoom("too many requests are being read"), false);
  held_body_bytes_ = counted;
  ReadBody();
}

void HttpConnection::OnRequest() {
  read_timer_.cancel();
  client_->WaitFor(ClientWaits::Wait::kNone);
  state_ = State::kResponding;
  close_after_response_ = !keep_alive_;
  core_->AddResponding(1);
  HttpRequest request = HeaderOf(parser_->get());
  request.has_body = HasBody(*parser_);
  request.body = std::move(parser_->get().body());
  exchange_ = std::make_shared<Exchange>(shared_from_this(), std::move(request), form());
  parser_.reset();
  if (buffer_.size() < core_->options.max_header_bytes) Watch();
  core_->handler(exchange_);
}

void HttpConnection::OnReadError(const ErrorCode& error) {
  if (error == http::error::body_limit) {
    return Reject(413, fmt::format("the body is larger than {} bytes", core_->options.max_body_bytes));
  }
  if (error == http::error::header_limit || error == http::error::buffer_overflow) {
    return Reject(431, fmt::format("the header, or a chunk's, or the trailers are larger than {} bytes",
                                   core_->options.max_header_bytes));
  }
  const bool closed = error == http::error::end_of_stream || error == http::error::partial_message;
  if (closed || error.category() != http::make_error_code(http::error::end_of_stream).category()) return DoClose();
  Reject(400, "the request is not valid HTTP: " + error.message());
}

// Answers outside any exchange and closes: the rest of the input cannot be trusted, or is not wanted.
void HttpConnection::Reject(int status, const std::string& message) {
  Answer({.status = status, .body = ErrorBody(status, message)}, false);
}

void HttpConnection::Answer(const HttpResponse& response, bool keep_alive) {
  read_timer_.cancel();
  client_->WaitFor(ClientWaits::Wait::kNone);
  client_->DropAll();
  parser_.reset();
  close_after_response_ = !keep_alive;
  state_ = State::kResponding;
  ResponseForm form = this->form();
  form.keep_alive = keep_alive;
  Send(WholeResponse(response, form), true);
}

// ---- writing

void HttpConnection::Send(std::string bytes, bool last) {
  if (state_ != State::kResponding) return;
  if (queued_.empty()) {
    queued_ = std::move(bytes);
  } else {
    queued_ += bytes;
  }
  last_queued_ = last_queued_ || last;
  if (!writing_) WriteNext();
}

void HttpConnection::WriteNext() {
  if (queued_.empty()) {
    if (last_queued_) OnResponseDone();
    return;
  }
  writing_ = true;
  in_flight_ = std::exchange(queued_, {});
  client_->WaitFor(ClientWaits::Wait::kAnswer);
  ArmWriteTimer();
  asio::async_write(stream_, asio::buffer(in_flight_),
                    [self = shared_from_this()](const ErrorCode& error, size_t) { self->OnWritten(error); });
}

void HttpConnection::OnWritten(const ErrorCode& error) {
  writing_ = false;
  write_timer_.cancel();
  const size_t sent = std::exchange(in_flight_, {}).size();
  if (state_ == State::kClosed) return;
  if (error) return Disconnected();
  client_->WaitFor(ClientWaits::Wait::kNone);
  client_->Drop(sent);
  if (exchange_ != nullptr) exchange_->OnSent(sent);
  WriteNext();
}

void HttpConnection::OnResponseDone() {
  last_queued_ = false;
  if (exchange_ != nullptr) {
    exchange_->Detach(false);
    exchange_.reset();
    core_->AddResponding(-1);
  }
  client_->DropAll();
  if (close_after_response_ || !chunked_ || core_->draining.load()) return Linger();
  state_ = State::kIdle;
  client_->WaitFor(ClientWaits::Wait::kIdle);
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

// Sends the end of the response and reads the client's remaining bytes for a limited time before the socket is closed.
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
  client_->WaitFor(ClientWaits::Wait::kNone);
  client_->DropAll();
  read_timer_.cancel();
  write_timer_.cancel();
  ErrorCode ignored;
  stream_.next_layer().shutdown(asio::ip::tcp::socket::shutdown_both, ignored);
  stream_.next_layer().close(ignored);
}

}  // namespace spl::router
