// A small HTTP server for operators and probes: /metrics, /healthz, /readyz. The router's API has its own server.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace spl {

struct HttpReply {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

// Owns one listener, one thread and at most 64 connections. A further connection replaces the one that has waited
// longest for its client, so that silent connections cannot keep probes out. A connection that sends no complete
// request for 10 s is closed. Serves GET and HEAD only; a request has at most 8 KiB of header and no body. Handlers run
// on the endpoint's thread, one at a time, and must not block. Call Stop() before destruction.
class HttpEndpoint {
 public:
  using Handlers = std::map<std::string, std::function<HttpReply()>>;  // by exact path, without the query

  // `listen` is HOST:PORT; HOST may be a name; port 0 picks a free one. Unavailable: the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpEndpoint>> Start(const std::string& listen, Handlers handlers);
  virtual ~HttpEndpoint() = default;

  virtual std::string address() const = 0;  // with the real port
  virtual void Stop() = 0;                  // closes all connections and joins the thread; idempotent
};

}  // namespace spl
