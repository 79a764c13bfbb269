// Trace contexts in gRPC metadata: keys traceparent and tracestate, as over HTTP.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>

#include "services/base/trace.h"

namespace spl {

// Adds the context to a call that has not started. Does nothing for an invalid context.
void AddTrace(grpc::ClientContext& call, const TraceContext& context);

// Returns the context that the caller sent, or a new trace of `tracer`.
TraceContext AcceptTrace(const Tracer& tracer, const grpc::ServerContextBase& call);

}  // namespace spl
