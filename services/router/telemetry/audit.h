// The audit log: one line router.audit for every call that affects more than one request, or that was refused. It names
// the API key, never shows it.
//
//   router.audit caller=first-service api=grpc call=DeleteNamespace target=docs result=OK
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace spl::router {

struct AuditEntry {
  std::string_view caller;  // empty: unknown
  std::string_view api;     // "http" or "grpc"
  std::string_view call;    // name of the gRPC method, for both APIs
  std::string_view target;  // object of the call; empty: unknown
  absl::Status result;
};

// Any thread.
void WriteAudit(const AuditEntry& entry);

}  // namespace spl::router
