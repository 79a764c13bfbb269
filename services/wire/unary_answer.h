// Ends a unary call of a worker.
#pragma once

#include <grpcpp/grpcpp.h>

#include "services/base/grpc_status.h"

namespace spl::wire {

// Sends the call's response, or the error. Returns the reactor that the handler must return.
inline grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const absl::Status& status) {
  auto* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

}  // namespace spl::wire
