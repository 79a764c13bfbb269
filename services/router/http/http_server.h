// The HTTP/1.1 server of the public API, in plain text or over TLS: keep-alive, bounded in every dimension, no thread
// per connection.
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

// Outcome of a TLS handshake with a client that has sent something.
enum class HandshakeResult {
  kOk,
  kFailed,     // no common version, a certificate that the client does not trust, or not TLS at all
  kTimeout,    // handshake_timeout
  kPlainText,  // a plain-text request: answered 400 in plain text, then closed
};

struct HttpServerOptions {
  std::string listen = "127.0.0.1:8000";  // HOST:PORT; port 0 picks a free one
  size_t max_connections = 4096;          // further ones get 503 and are closed; with TLS they are closed at once
  size_t max_header_bytes = 16 << 10;     // more gets 431
  size_t max_body_bytes = 8 << 20;        // more gets 413
  // Limit over all connections together: bodies that are being read or wait, and answers that clients have not taken
  // yet. Beyond it, connections are evicted whose clients have kept the server waiting longest, and at least
  // `eviction_age`: a body gets 503, an answer is cut off. If all are younger, the newcomer gets 503. The first 16
  // KiB of each body do not count.
  size_t max_buffered_bytes = 256 << 20;
  // With max_connections open, an idle connection of this age, or one whose request has been incomplete for so long,
  // makes room for a new one.
  std::chrono::milliseconds eviction_age{1'000};
  std::chrono::milliseconds idle_timeout{75'000};   // between two requests of a connection
  std::chrono::milliseconds read_timeout{30'000};   // from a request's first byte to its last
  std::chrono::milliseconds write_timeout{30'000};  // without progress: the client does not read
  size_t max_pending_bytes = 256 << 10;             // per stream, before the sender is told to pause
  std::shared_ptr<const HttpTls> tls;               // null: plain text
  // With TLS: limit from the connection to the end of the handshake.
  std::chrono::milliseconds handshake_timeout{10'000};
  // With TLS: called after each handshake, on the server's threads. May be null.
  std::function<void(HandshakeResult)> on_handshake;
};

struct HttpRequest {
  std::string method;  // upper case; GET for HEAD, which gets the same answer without the body
  std::string path;    // without the query
  std::string query;   // after the question mark, still encoded
  std::string body;
  std::string authorization;  // the header; without it, "Bearer KEY" with the key of the header x-api-key
  std::string request_id;     // the header x-request-id
  std::string traceparent, tracestate;
  std::string timeout_ms;  // the header x-request-timeout-ms
  std::string host, origin, sec_fetch_site, content_type;
  std::string preflight_headers;  // the header access-control-request-headers
  std::string if_none_match;      // the header of this name
  bool forwarded = false;         // true: a proxy that says so has forwarded it (forwarded, x-forwarded-for, via)
  bool has_body = false;          // true: its header announces a body
  // Arrival time of its last byte.
  std::chrono::steady_clock::time_point received = std::chrono::steady_clock::now();
};

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  HttpHeaders headers;
};

// One request and the one response to it. Any thread may call any method. After the response is complete, or the client
// is gone, they do nothing. Keeps its connection alive while held.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;
  virtual const HttpRequest& request() const = 0;
  // Moves the body out, once: its memory is then the caller's and no longer counts in max_buffered_bytes.
  virtual std::string TakeBody() = 0;

  // Sends a whole response. One that does not fit into max_buffered_bytes becomes a 503.
  virtual void Respond(HttpResponse response) = 0;

  // Sends a response in pieces: StartStream, Write…, EndStream.
  virtual void StartStream(std::string content_type, HttpHeaders headers) = 0;
  // False: more than max_pending_bytes wait for the client; stop until the drain callback runs.
  virtual bool Write(std::string bytes) = 0;
  virtual void EndStream() = 0;
  // `on_drained` runs on the server's threads each time all waiting bytes have been sent. Set it before the first
  // Write.
  virtual void SetDrainCallback(std::function<void()> on_drained) = 0;

  // `on_disconnect` runs once if the client leaves before the response is complete; at once if it has already left.
  virtual void SetDisconnectCallback(std::function<void()> on_disconnect) = 0;
};

// Called on the server's threads; must only hand work on.
using HttpHandler = std::function<void(std::shared_ptr<HttpExchange>)>;
// Checks a request's header before its body is read. A response is sent as the answer, the body is never read, and the
// connection closes. Nothing: the request proceeds.
using HttpGate = std::function<std::optional<HttpResponse>(const HttpRequest& header)>;
// The body of an error response for a status and message: the error object of the API that `path` belongs to. The path
// is empty if it is not known yet.
using HttpErrorBody = std::function<std::string(int status, const std::string& message, const std::string& path)>;

// Owns the listener and the connections. Borrows the io_context, whose threads run everything.
class HttpServer {
 public:
  // Unavailable: the address cannot be bound. InvalidArgument: it is malformed. `gate` null: all requests proceed.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(boost::asio::io_context& io, HttpServerOptions options,
                                                           HttpHandler handler, HttpErrorBody error_body,
                                                           HttpGate gate = nullptr);
  virtual ~HttpServer() = default;

  virtual std::string address() const = 0;  // with the real port
  // Accepts no further connections and closes the idle ones; running responses continue. Any thread may call; blocks
  // until done.
  virtual void StopAccepting() = 0;
  // Waits until every running response has been sent, at most `timeout`. Blocks. Call it after StopAccepting.
  virtual void FinishResponses(std::chrono::milliseconds timeout) = 0;
  // The bytes that max_buffered_bytes limits.
  virtual size_t buffered_bytes() const = 0;
  // The peak of buffered_bytes since the last call.
  virtual size_t TakePeakBytes() = 0;
  // Closes every connection. Blocks until all are gone, 10 s at most (the io_context must still run).
  virtual void CloseAll() = 0;
};

}  // namespace spl::router
