// Fields of a request that all handlers of the public API read or report: id, deadline, those without effect.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/router/http/http_server.h"

namespace spl::router {

// Seconds since 1970: "created" of answers.
int64_t UnixSeconds();

// The client's own id when it is harmless in a header and a log line; else a new one.
std::string RequestIdOf(const HttpRequest& request);

// Sets `deadline` if the request has the header x-request-timeout-ms. InvalidArgument: it is no number of milliseconds.
absl::Status ReadTimeout(const HttpRequest& request, std::chrono::steady_clock::time_point* deadline);

// The header x-splice-ignored with the first fields that had no effect; those that do not fit into a header are "?".
HttpHeaders IgnoredHeader(const std::vector<std::string>& ignored);

// InvalidArgument: there is such a field, and requests are `strict`.
absl::Status CheckIgnored(const std::vector<std::string>& ignored, bool strict);

}  // namespace spl::router
