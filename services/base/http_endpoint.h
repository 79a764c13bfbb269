// A small HTTP server for what operators and probes read: /metrics, /healthz, /readyz. The API of the router is not
// this: it has its own server.
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

// Owns one listener, one thread and at most 64 connections: one more takes the place of the one that has waited longest
// for its client, so that silent connections keep no probe out. A connection that sends no complete request for 10 s is
// closed. GET and HEAD only; a request has at most 8 KiB of header and no body. Handlers
// run on the endpoint's thread, one at a time, and must not block. Stop() before destruction.
class HttpEndpoint {
 public:
  using Handlers = std::map<std::string, std::function<HttpReply()>>;  // by exact path, without the query

  // `listen` is HOST:PORT; HOST may be a name; port 0 picks a free one. Unavailable when the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpEndpoint>> Start(const std::string& listen, Handlers handlers);
  virtual ~HttpEndpoint() = default;

  virtual std::string address() const = 0;  // with the real port
  virtual void Stop() = 0;                  // closes all connections and joins the thread; idempotent
};

}  // namespace spl
