#include "services/base/grpc_trace.h"

namespace spl {

void AddTrace(grpc::ClientContext& call, const TraceContext& context) {
  if (!context.valid()) return;
  call.AddMetadata("traceparent", context.ToTraceParent());
  if (!context.state.empty()) call.AddMetadata("tracestate", context.state);
}

TraceContext AcceptTrace(const Tracer& tracer, const grpc::ServerContextBase& call) {
  const auto& metadata = call.client_metadata();
  const auto value = [&](const char* key) {
    const auto found = metadata.find(key);
    return found == metadata.end() ? std::string_view() : std::string_view(found->second.data(), found->second.size());
  };
  return tracer.Accept(value("traceparent"), value("tracestate"));
}

}  // namespace spl
