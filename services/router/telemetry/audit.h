// The audit log: one line router.audit for every call that changes something for others than one request, or that was
// refused. Who is the name of the API key, never the key.
//
//   router.audit caller=first-service api=grpc call=DeleteNamespace target=docs result=OK
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace spl::router {

struct AuditEntry {
  std::string_view caller;  // empty: nobody known
  std::string_view api;     // "http" or "grpc"
  std::string_view call;    // as the gRPC method is called, for both
  std::string_view target;  // what it was about; empty: not known
  absl::Status result;
};

// Any thread.
void WriteAudit(const AuditEntry& entry);

}  // namespace spl::router
