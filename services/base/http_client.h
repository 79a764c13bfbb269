// A small client of HTTP/1.1 servers, in plain text or by TLS: one call at a time, on the calling thread.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/tls_stream.h"

namespace spl {

struct HttpClientOptions {
  std::string host;  // a name or an address, without the brackets of IPv6
  std::string port;
  std::string server;                     // for messages: "the collector at HOST:PORT"
  std::shared_ptr<const TlsTrust> trust;  // null: plain text
  // From the start of a call to the head of the answer; 0: no limit. The resolver of the system has its own.
  std::chrono::milliseconds timeout{0};
  bool keep_alive = false;  // false: every call has a connection of its own
};

struct HttpCall {
  std::string method = "GET";
  std::string target;
  std::vector<std::pair<std::string, std::string>> headers;  // beside Host, Connection and Content-Length
  std::string body;
  // Between two pieces of the answer's body; 0: no limit.
  std::chrono::milliseconds body_timeout{0};
};

// The first part of an answer, before its body.
struct HttpHead {
  int status = 0;
  std::vector<std::pair<std::string, std::string>> fields;  // as the server spells them

  // The first field of that name, whatever its case; empty: there is none.
  std::string Field(std::string_view name) const;
};

struct HttpAnswer {
  int status = 0;
  std::string body;
};

// One thread at a time, but for Cancel.
class HttpClient {
 public:
  // The status, and a piece of the body. False ends the call and the connection.
  using OnData = std::function<bool(int status, std::string_view piece)>;

  // The head, before any piece of the body. False ends the call and the connection.
  using OnHead = std::function<bool(const HttpHead& head)>;

  explicit HttpClient(HttpClientOptions options);
  ~HttpClient();

  // The server's status, whatever it is. A kept connection that turns out to be gone is made anew, once. Unavailable:
  // the server cannot be reached, is not believed, or the connection was lost. DeadlineExceeded. Cancelled.
  absl::StatusOr<int> Exchange(const HttpCall& call, const OnData& on_data);
  absl::StatusOr<int> Exchange(const HttpCall& call, const OnHead& on_head, const OnData& on_data);
  // ResourceExhausted: the body is longer than `max_bytes`.
  absl::StatusOr<HttpAnswer> Call(const HttpCall& call, size_t max_bytes);
  // False when cancelled.
  bool Pause(std::chrono::milliseconds time);

  // Any thread: ends what runs and all that would.
  void Cancel();
  bool cancelled() const;

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace spl
