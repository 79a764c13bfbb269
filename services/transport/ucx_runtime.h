// What UCX has once per process: its signal handlers, its log, its error codes.
#pragma once

#include <sys/socket.h>
#include <ucp/api/ucp.h>

#include <string>

#include "absl/status/status.h"

namespace spl::transport {

// Takes UCX's crash handlers out again (they are installed when the library loads, and would hide a crash from the
// core dump and the sanitizers) and sends its messages, which it would print to stdout, to our log. Idempotent.
void InitUcxProcess();

// The cause in UCX's words under the code callers act on: peer gone or unreachable → Unavailable, no memory →
// ResourceExhausted, everything unexpected → Internal.
absl::Status StatusFromUcs(ucs_status_t status, const std::string& what);

// "host:port"; empty for another family than IPv4 and IPv6.
std::string AddressText(const sockaddr_storage& address);

}  // namespace spl::transport
