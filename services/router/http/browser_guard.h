// Keeps web pages away from the routes that operate the cluster. A browser on a machine that reaches the router sends
// any request that a page asks for. It does say where the page comes from, and it sends body types that forms cannot
// have only if the server agrees.
#pragma once

#include <functional>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "services/router/http/http_server.h"

namespace spl::router {

// Checks the header of a request to the admin or control API. Returns the answer to a forbidden one:
//   403  a page of another origin makes it (Origin, Sec-Fetch-Site)
//   415  its body, or what it declares as one, is not application/json
//   403  without API keys: Host does not name this machine's loopback (a page may have its own name resolve to it), or
//        a proxy has forwarded the request, so that it may come from anywhere
// Nothing: the request may proceed. `has_keys`: the caller must show an API key, which no page of another origin knows.
std::optional<HttpResponse> RefuseBrowser(const HttpRequest& header, bool has_keys);

struct Refusal {
  HttpResponse response;
  absl::Status why;  // for the audit log
};
// RefuseBrowser, then `authorize`. Returns the answer to a forbidden request; nothing: it may proceed.
std::optional<Refusal> RefuseOperation(const HttpRequest& header, bool has_keys,
                                       const std::function<absl::Status()>& authorize);

// True for a Host header that names the loopback: "localhost:8000", "127.0.0.1", "[::1]:80".
bool IsLoopbackHost(std::string_view host);

}  // namespace spl::router
