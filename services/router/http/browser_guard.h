// Keeps web pages away from what operates the cluster. A browser on a machine that reaches the router sends what any
// page asks it to; it says where the page is from, and does not send the types of bodies that forms cannot have unless
// the server agrees.
#pragma once

#include <functional>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "services/router/http/http_server.h"

namespace spl::router {

// The answer to a request of the admin or control API that must not be made, from its header:
//   403  a page of another origin makes it (Origin, Sec-Fetch-Site)
//   415  its body, or what it says is one, is not application/json
//   403  without API keys: Host does not name this machine's loopback (a page may have a name of its own resolve to
//   it),
//        or a proxy has forwarded it, so that it may come from anywhere
// Nothing: it may go on. `has_keys`: the caller has to show an API key, which no page of another origin knows.
std::optional<HttpResponse> RefuseBrowser(const HttpRequest& header, bool has_keys);

struct Refusal {
  HttpResponse response;
  absl::Status why;  // for the audit log
};
// RefuseBrowser, then `authorize`: the answer to a request that must not be made, or nothing.
std::optional<Refusal> RefuseOperation(const HttpRequest& header, bool has_keys,
                                       const std::function<absl::Status()>& authorize);

// "localhost:8000", "127.0.0.1", "[::1]:80": a Host header that names the loopback.
bool IsLoopbackHost(std::string_view host);

}  // namespace spl::router
