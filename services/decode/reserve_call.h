// A Reserve call, from its arrival until its answer: a grammar may have to be compiled in between.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>

#include "absl/status/status.h"
#include "services/base/grpc_status.h"
#include "services/base/grpc_trace.h"
#include "services/base/trace.h"
#include "spl/v1/decode.pb.h"

namespace spl::decode {

// Context and response live until End has been called.
class ReserveCall {
 public:
  ReserveCall(const Tracer& tracer, grpc::CallbackServerContext& context, v1::Ticket& response)
      : context_(context),
        response_(response),
        span_(tracer, "decode.reserve", AcceptTrace(tracer, context), SpanKind::kServer, start_),
        reactor_(context.DefaultReactor()) {}

  grpc::ServerUnaryReactor* reactor() const { return reactor_; }

  // Once. Who finds no room is told to come again after some steps of `step_s`.
  void End(const absl::Status& status, double step_s) {
    span_.SetStatus(status);
    span_.End();
    response_.set_reserve_seconds(std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count());
    if (status.code() == absl::StatusCode::kResourceExhausted)
      SetRetryAfter(context_, std::chrono::milliseconds(static_cast<int64_t>(step_s * 32'000) + 50));
    reactor_->Finish(ToGrpcStatus(status));
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  grpc::CallbackServerContext& context_;
  v1::Ticket& response_;
  Span span_;
  grpc::ServerUnaryReactor* const reactor_;
};

}  // namespace spl::decode
