// Calls to a chunk store, one of several perhaps.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "services/base/grpc_status.h"
#include "services/base/status.h"

namespace spl::chunk {

// True if the store, or the way to it, is down or too slow: another one may still answer.
inline bool IsLoss(const absl::Status& status) {
  return status.code() == absl::StatusCode::kUnavailable || status.code() == absl::StatusCode::kDeadlineExceeded;
}

// The status of a call to a store, which nobody here has cancelled. Cancelled comes from a store that stops: it ends
// the calls that it has. That is a loss, and Unavailable.
inline absl::Status FromStoreStatus(const grpc::Status& status) {
  if (status.error_code() != grpc::StatusCode::CANCELLED) return FromGrpcStatus(status);
  return absl::UnavailableError("the store stopped during the call");
}

template <typename Stub>
struct StoreMember {
  std::string address;
  std::unique_ptr<Stub> stub;
};

// Waits for the answer, until `deadline` at most. The message of a loss names the store.
template <typename Response, typename Stub, typename Request>
absl::StatusOr<Response> CallStore(const StoreMember<Stub>& member,
                                   grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                                   const Request& request, std::chrono::steady_clock::time_point deadline) {
  grpc::ClientContext context;
  context.set_deadline(ToGrpcDeadline(deadline));
  Response response;
  const absl::Status status = FromStoreStatus((member.stub.get()->*method)(&context, request, &response));
  if (!status.ok()) return IsLoss(status) ? Annotate(status, "chunk store " + member.address) : status;
  return response;
}

}  // namespace spl::chunk
