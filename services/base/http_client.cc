#include "services/base/http_client.h"

#include <array>
#include <atomic>
#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <optional>

#include "services/base/status.h"

namespace spl {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using tcp = asio::ip::tcp;
using Clock = std::chrono::steady_clock;

class HttpClient::Impl {
 public:
  explicit Impl(HttpClientOptions options) : options_(std::move(options)) {}

  absl::StatusOr<int> Exchange(const HttpCall& call, const OnHead& on_head, const OnData& on_data) {
    deadline_ = After(options_.timeout);
    Parser parser;
    for (bool fresh = stream_ == nullptr;; fresh = true) {
      const absl::Status status = Ask(call, parser.emplace());
      if (status.ok()) break;
      Close();
      if (fresh || status.code() != absl::StatusCode::kUnavailable) return status;
    }
    const int status = static_cast<int>(parser->get().result_int());
    if (on_head && !on_head(HeadOf(parser->get()))) {
      Close();
      return status;
    }
    const absl::Status read = ReadBody(call, *parser, on_data);
    if (!read.ok() || !parser->is_done() || !parser->get().keep_alive()) Close();
    SPLICE_RETURN_IF_ERROR(read);
    return status;
  }

  bool Pause(std::chrono::milliseconds time) {
    timer_.expires_after(time);
    Run([&](auto done) { timer_.async_wait([done](const boost::system::error_code&) { done(); }); });
    return !cancelled_;
  }

  void Cancel() {
    asio::post(io_, [this] {
      cancelled_ = true;
      resolver_.cancel();
      timer_.cancel();
      if (stream_ != nullptr) stream_->next_layer().cancel();
    });
  }
  bool cancelled() const { return cancelled_; }

  void Close() {
    if (stream_ == nullptr) return;
    beast::error_code ignored;
    stream_->next_layer().socket().close(ignored);
    stream_.reset();
  }

 private:
  using Stream = TlsStream<beast::tcp_stream>;
  using Parser = std::optional<http::response_parser<http::buffer_body>>;

  static HttpHead HeadOf(const http::response<http::buffer_body>& response) {
    HttpHead head{.status = static_cast<int>(response.result_int()), .fields = {}};
    for (const auto& field : response) head.fields.emplace_back(field.name_string(), field.value());
    return head;
  }

  static Clock::time_point After(std::chrono::milliseconds time) {
    return time.count() == 0 ? Clock::time_point::max() : Clock::now() + time;
  }

  // Starts one operation and runs the context until it has ended.
  template <typename Start>
  void Run(Start start) {
    bool ended = false;
    if (!cancelled_) {
      start([&ended] { ended = true; });
      io_.restart();
      while (!ended) io_.run_one();
    }
    io_.restart();
    io_.poll();  // a Cancel that came meanwhile
  }

  template <typename Start>
  absl::Status Step(const char* what, Start start) {
    error_ = {};
    if (deadline_ == Clock::time_point::max())
      stream_->next_layer().expires_never();
    else
      stream_->next_layer().expires_at(deadline_);
    Run([&](auto done) {
      start([this, done](const beast::error_code& e, auto&&...) {
        error_ = e;
        done();
      });
    });
    if (cancelled_) return absl::CancelledError("stopped");
    if (error_ == beast::error::timeout)
      return Errorf(absl::StatusCode::kDeadlineExceeded, "{} did not answer in time", options_.server);
    if (!error_) return absl::OkStatus();
    return Errorf(absl::StatusCode::kUnavailable, "{} {}: {}", what, options_.server, error_.message());
  }

  absl::Status Connect() {
    if (cancelled_) return absl::CancelledError("stopped");
    buffer_.clear();
    stream_ = std::make_unique<Stream>(io_);
    tcp::resolver::results_type addresses;
    SPLICE_RETURN_IF_ERROR(Step("cannot resolve", [&](auto done) {
      resolver_.async_resolve(options_.host, options_.port,
                              [&addresses, done](const beast::error_code& e, tcp::resolver::results_type found) {
                                addresses = std::move(found);
                                done(e);
                              });
    }));
    SPLICE_RETURN_IF_ERROR(
        Step("cannot connect to", [&](auto done) { stream_->next_layer().async_connect(addresses, done); }));
    beast::error_code ignored;
    stream_->next_layer().socket().set_option(tcp::no_delay(true), ignored);
    if (options_.trust == nullptr) return absl::OkStatus();
    options_.trust->Start(*stream_, options_.host);
    const absl::Status status =
        Step("TLS with", [&](auto done) { stream_->async_handshake(asio::ssl::stream_base::client, done); });
    if (status.code() != absl::StatusCode::kUnavailable) return status;
    return Errorf(absl::StatusCode::kUnavailable, "{}: {}", options_.server,
                  options_.trust->Explain(stream_->native_handle(), options_.host, error_));
  }

  // Sends the request and reads the answer's head.
  absl::Status Ask(const HttpCall& call, http::response_parser<http::buffer_body>& parser) {
    if (stream_ == nullptr) SPLICE_RETURN_IF_ERROR(Connect());
    http::request<http::string_body> request;
    request.method_string(call.method);
    request.target(call.target);
    request.version(11);
    const bool ipv6 = options_.host.find(':') != std::string::npos;
    // Without the scheme's own port: signed URLs of object stores are signed for that form.
    const bool usual_port = options_.port == (options_.trust != nullptr ? "443" : "80");
    request.set(http::field::host,
                (ipv6 ? "[" + options_.host + "]" : options_.host) + (usual_port ? "" : ":" + options_.port));
    request.set(http::field::user_agent, "splice");
    for (const auto& [name, value] : call.headers) request.set(name, value);
    request.body() = call.body;
    request.keep_alive(options_.keep_alive);
    request.prepare_payload();
    SPLICE_RETURN_IF_ERROR(Step("connection lost to", [&](auto done) { http::async_write(*stream_, request, done); }));
    parser.body_limit(uint64_t{1} << 62);  // callers have limits of their own
    return Step("connection lost to", [&](auto done) { http::async_read_header(*stream_, buffer_, parser, done); });
  }

  absl::Status ReadBody(const HttpCall& call, http::response_parser<http::buffer_body>& parser, const OnData& on_data) {
    const int status = static_cast<int>(parser.get().result_int());
    std::array<char, 65536> piece;
    while (!parser.is_done()) {
      parser.get().body().data = piece.data();
      parser.get().body().size = piece.size();
      deadline_ = After(call.body_timeout);
      SPLICE_RETURN_IF_ERROR(Step("connection lost to", [&](auto done) {
        http::async_read_some(*stream_, buffer_, parser, [done](const beast::error_code& e, size_t size) {
          done(e == http::error::need_buffer ? beast::error_code() : e, size);
        });
      }));
      if (!on_data(status, {piece.data(), piece.size() - parser.get().body().size})) return absl::OkStatus();
    }
    return absl::OkStatus();
  }

  const HttpClientOptions options_;
  asio::io_context io_;
  tcp::resolver resolver_{io_};
  asio::steady_timer timer_{io_};
  std::unique_ptr<Stream> stream_;  // null: not connected
  beast::flat_buffer buffer_;
  Clock::time_point deadline_;
  beast::error_code error_;
  std::atomic<bool> cancelled_{false};
};

std::string HttpHead::Field(std::string_view name) const {
  for (const auto& [key, value] : fields) {
    if (beast::iequals({key.data(), key.size()}, {name.data(), name.size()})) return value;
  }
  return "";
}

HttpClient::HttpClient(HttpClientOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
HttpClient::~HttpClient() = default;

absl::StatusOr<int> HttpClient::Exchange(const HttpCall& call, const OnData& on_data) {
  return impl_->Exchange(call, nullptr, on_data);
}

absl::StatusOr<int> HttpClient::Exchange(const HttpCall& call, const OnHead& on_head, const OnData& on_data) {
  return impl_->Exchange(call, on_head, on_data);
}

absl::StatusOr<HttpAnswer> HttpClient::Call(const HttpCall& call, size_t max_bytes) {
  HttpAnswer answer;
  bool too_long = false;
  SPLICE_ASSIGN_OR_RETURN(answer.status, impl_->Exchange(call, nullptr, [&](int, std::string_view piece) {
    too_long = answer.body.size() + piece.size() > max_bytes;
    if (!too_long) answer.body += piece;
    return !too_long;
  }));
  if (too_long)
    return Errorf(absl::StatusCode::kResourceExhausted, "the answer to {} has more than {} bytes", call.target,
                  max_bytes);
  return answer;
}

bool HttpClient::Pause(std::chrono::milliseconds time) { return impl_->Pause(time); }
void HttpClient::Cancel() { impl_->Cancel(); }
bool HttpClient::cancelled() const { return impl_->cancelled(); }

}  // namespace spl
