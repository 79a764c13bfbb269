// Process-wide parts of UCX: its signal handlers, its log, its error codes.
#pragma once

#include <sys/socket.h>
#include <ucp/api/ucp.h>

#include <string>

#include "absl/status/status.h"

namespace spl::transport {

// Sends UCX's messages, which it would print to stdout, to our log. Idempotent. (UCX's crash handlers are removed by
// services/base/crash_handler.h, at the start of main.)
void InitUcxProcess();

// Maps UCX's error, with its text, to the code that callers act on: peer gone or unreachable → Unavailable, no memory →
// ResourceExhausted, anything unexpected → Internal.
absl::Status StatusFromUcs(ucs_status_t status, const std::string& what);

// "host:port"; empty: a family other than IPv4 and IPv6.
std::string AddressText(const sockaddr_storage& address);

}  // namespace spl::transport
