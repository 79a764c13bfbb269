// The HTTP/1.1 server of the public API: keep-alive, bounded in every dimension, no thread per connection; in plain
// text or over TLS.
#pragma once

#include <boost/asio/io_context.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::router {

class HttpTls;

// How TLS began with a client that has sent something.
enum class HandshakeResult {
  kOk,
  kFailed,     // no common version, a certificate that the client does not believe, or no TLS at all
  kTimeout,    // handshake_timeout
  kPlainText,  // a request in plain text: 400 in plain text, then closed
};

struct HttpServerOptions {
  std::string listen = "127.0.0.1:8000";  // HOST:PORT; port 0 picks a free one
  size_t max_connections = 4096;          // one more gets 503 and is closed; with TLS it is closed at once
  size_t max_header_bytes = 16 << 10;     // more gets 431
  size_t max_body_bytes = 8 << 20;        // more gets 413
  // Of all connections together: bodies that are read or wait to be, and answers that clients have not taken yet.
  // Beyond it those go whose clients have kept the server waiting longest, and at least `eviction_age`; a body gets
  // 503, an answer is cut. When all are younger the newcomer gets 503. What counts little is not counted: 16 KiB of
  // each body.
  size_t max_buffered_bytes = 256 << 20;
  // With max_connections open, an idle connection of this age makes room for a new one, or one whose request has not
  // come for so long.
  std::chrono::milliseconds eviction_age{1'000};
  std::chrono::milliseconds idle_timeout{75'000};   // between requests of a connection
  std::chrono::milliseconds read_timeout{30'000};   // from a request's first byte to its last
  std::chrono::milliseconds write_timeout{30'000};  // without progress: the client does not read
  size_t max_pending_bytes = 256 << 10;             // of a stream, before the sender is told to pause
  std::shared_ptr<const HttpTls> tls;               // null: plain text
  // With TLS: from the connection to the end of the handshake.
  std::chrono::milliseconds handshake_timeout{10'000};
  // With TLS, on the server's threads; null: nobody counts.
  std::function<void(HandshakeResult)> on_handshake;
};

struct HttpRequest {
  std::string method;  // upper case; GET for HEAD, which is answered like it but for the body
  std::string path;    // without the query
  std::string query;   // behind the question mark, still encoded
  std::string body;
  std::string authorization;
  std::string request_id;  // the header x-request-id
  std::string traceparent, tracestate;
  std::string timeout_ms;  // the header x-request-timeout-ms
  std::string host, origin, sec_fetch_site, content_type;
  bool forwarded = false;  // by a proxy that says so (forwarded, x-forwarded-for, via)
  bool has_body = false;   // its header announces one
  // When its last byte was here.
  std::chrono::steady_clock::time_point received = std::chrono::steady_clock::now();
};

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  HttpHeaders headers;
};

// One request and the one response to it. All methods may be called from any thread; after the response is complete, or
// the client is gone, they do nothing. Keeps its connection alive while held.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;
  virtual const HttpRequest& request() const = 0;
  // Moves the body out, once: its memory is then the caller's, and no longer counted in max_buffered_bytes.
  virtual std::string TakeBody() = 0;

  // A whole response. One that does not fit into max_buffered_bytes becomes a 503.
  virtual void Respond(HttpResponse response) = 0;

  // A response in pieces: StartStream, Write…, EndStream.
  virtual void StartStream(std::string content_type, HttpHeaders headers) = 0;
  // False: more than max_pending_bytes wait for the client; stop until the drain callback runs.
  virtual bool Write(std::string bytes) = 0;
  virtual void EndStream() = 0;
  // `on_drained` runs, on the server's threads, each time what waited has been sent. Set it before the first Write.
  virtual void SetDrainCallback(std::function<void()> on_drained) = 0;

  // Runs once if the client leaves before the response is complete; at once if it has left already.
  virtual void SetDisconnectCallback(std::function<void()> on_disconnect) = 0;
};

// Answers on the server's threads; must only hand work on.
using HttpHandler = std::function<void(std::shared_ptr<HttpExchange>)>;
// Looks at a request's header, its body not read yet. A response: that is the answer, and the body is never read (the
// connection then closes).
using HttpGate = std::function<std::optional<HttpResponse>(const HttpRequest& header)>;
// The body of an error response for a status and message (the API's error object).
using HttpErrorBody = std::function<std::string(int status, const std::string& message)>;

// Owns the listener and the connections; borrows the io_context, whose threads run everything.
class HttpServer {
 public:
  // Unavailable when the address cannot be bound, InvalidArgument when it is malformed. `gate` null: all may pass.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(boost::asio::io_context& io, HttpServerOptions options,
                                                           HttpHandler handler, HttpErrorBody error_body,
                                                           HttpGate gate = nullptr);
  virtual ~HttpServer() = default;

  virtual std::string address() const = 0;  // with the real port
  // Accepts no further connection and closes the idle ones; responses under way go on. Any thread; blocks until done.
  virtual void StopAccepting() = 0;
  // Waits until every response under way has been sent, `timeout` at most. Blocks; after StopAccepting.
  virtual void FinishResponses(std::chrono::milliseconds timeout) = 0;
  // See max_buffered_bytes.
  virtual size_t buffered_bytes() const = 0;
  // The most that this was since the last call.
  virtual size_t TakePeakBytes() = 0;
  // Closes every connection. Blocks until that is done (the io_context must still run).
  virtual void CloseAll() = 0;
};

}  // namespace spl::router
