// Trace contexts in gRPC metadata: keys traceparent and tracestate, as over HTTP.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>

#include "services/base/trace.h"

namespace spl {

// Before the call starts. Nothing for an invalid context.
void AddTrace(grpc::ClientContext& call, const TraceContext& context);

// What the caller sent, or a new trace of `tracer`.
TraceContext AcceptTrace(const Tracer& tracer, const grpc::ServerContextBase& call);

}  // namespace spl
