// A unary call to one chunk store of several.
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
  const absl::Status status = FromGrpcStatus((member.stub.get()->*method)(&context, request, &response));
  if (!status.ok()) return IsLoss(status) ? Annotate(status, "chunk store " + member.address) : status;
  return response;
}

}  // namespace spl::chunk
