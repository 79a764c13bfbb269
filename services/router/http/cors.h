// Cross-origin requests: which web pages of other origins may read the answers of the API in a browser.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/router/http/http_server.h"

namespace spl::router {

// Immutable; any thread. Grants no cookies: a page must bring its API key in a header of its own.
class Cors {
 public:
  // Origins like "https://app.example:8443", or "*" for all; none: browsers keep the answers from all pages.
  explicit Cors(std::vector<std::string> origins) : origins_(std::move(origins)) {}
  // InvalidArgument names an entry that is neither.
  static absl::Status Check(const std::vector<std::string>& origins);

  // The headers by which a browser lets a page of `origin` read an answer; none: it does not.
  HttpHeaders HeadersFor(const std::string& origin) const;
  // The answer to a browser that asks for a page whether it may send a request. Nothing: the request is no such
  // question, or the page may not.
  std::optional<HttpResponse> Preflight(const HttpRequest& request) const;
  // The same exchange, whose answer has these headers, too.
  std::shared_ptr<HttpExchange> Wrap(std::shared_ptr<HttpExchange> exchange) const;

 private:
  const std::vector<std::string> origins_;
};

}  // namespace spl::router
