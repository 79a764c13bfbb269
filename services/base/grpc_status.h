// absl::Status across gRPC: the codes are the same by definition, messages travel unchanged.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <optional>

#include "absl/status/status.h"

namespace spl {

grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

// The trailer "retry-after-ms" of a ResourceExhausted or Unavailable answer: how long the caller should wait before it
// tries again. Set it before Finish; read it after the call has ended. A trailer that is not a number counts as absent.
void SetRetryAfter(grpc::ServerContextBase& context, std::chrono::milliseconds delay);
std::optional<std::chrono::milliseconds> RetryAfterOf(const grpc::ClientContext& context);

// gRPC deadlines are wall-clock times, Splice's are steady ones. steady_clock::time_point::max() means none.
std::chrono::system_clock::time_point ToGrpcDeadline(std::chrono::steady_clock::time_point deadline);
std::chrono::steady_clock::time_point FromGrpcDeadline(std::chrono::system_clock::time_point deadline);

}  // namespace spl
