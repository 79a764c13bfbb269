// A gRPC call that ends when the engine has finished its work.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include "services/base/grpc_status.h"
#include "services/base/grpc_trace.h"
#include "services/base/trace.h"
#include "services/engine/engine.h"

namespace spl::prefill {

// Lives until gRPC has finished the call, which is after End. End is called exactly once: when the call is refused, or
// by the engine's on_done (for a Run with something to undo, by way of the push). Any thread may call.
template <typename Request, typename Response>
class EngineCall final : public grpc::ServerUnaryReactor {
 public:
  EngineCall(engine::PrefillEngine& engine, const Tracer& tracer, const char* name, const std::string& worker_id,
             grpc::CallbackServerContext* context, const Request* request, Response* response)
      : context(context),
        request(request),
        response(response),
        span(tracer, name, AcceptTrace(tracer, *context), SpanKind::kServer),
        engine_(engine) {
    span.Set("splice.request", request->request_id());
    span.Set("splice.worker", worker_id);
  }

  // Call it instead of Finish.
  void End(const absl::Status& status) {
    span.SetStatus(status);
    span.End();
    this->Finish(ToGrpcStatus(status));
  }

  // Ends a call that `started` refuses; the trailer says when to try again.
  EngineCall* EndUnless(const absl::Status& started) {
    constexpr std::chrono::milliseconds kRetryAfter{200};
    if (started.ok()) return this;
    if (started.code() == absl::StatusCode::kResourceExhausted) SetRetryAfter(*context, kRetryAfter);
    End(started);
    return this;
  }

  void OnCancel() override {
    cancelled->store(true);
    engine_.Wake();
  }
  void OnDone() override { delete this; }

  grpc::CallbackServerContext* const context;
  const Request* const request;
  Response* const response;
  const engine::CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
  Span span;
  const std::chrono::steady_clock::time_point arrived = std::chrono::steady_clock::now();

 private:
  engine::PrefillEngine& engine_;
};

}  // namespace spl::prefill
