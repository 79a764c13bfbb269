// Cost of tracing for an unsampled request: contexts and spans that do nothing, and a context in the metadata of a call
// over loopback beside a call without.
//
//   splice_trace_bench
#include <benchmark/benchmark.h>
#include <grpcpp/grpcpp.h>

#include "services/base/grpc_trace.h"
#include "spl/v1/decode.grpc.pb.h"

namespace {

using namespace spl;

class NullSink final : public SpanSink {
 public:
  void Take(SpanData) override {}
};

// As many as a request has at the router: its own, three calls, eight stages; with and without a traceparent.
void SpansOfARequest(benchmark::State& state, double ratio) {
  const Tracer tracer(std::make_shared<NullSink>(), ratio);
  for (auto _ : state) {
    const TraceContext parent = tracer.Accept("");
    const TraceContext request = tracer.MakeChild(parent);
    benchmark::DoNotOptimize(request.ToTraceParent());
    for (int i = 0; i < 3; ++i) {
      Span call(tracer, "router.prefill", request, SpanKind::kClient);
      call.Set("splice.worker", "p0");
      call.End();
    }
    for (int i = 0; i < 8; ++i) tracer.Record(request, {.name = "router.queue"});
    tracer.Record(request, parent, {.name = "router.request"});
  }
}

class Echo final : public v1::Decode::CallbackService {
 public:
  grpc::ServerUnaryReactor* GetInfo(grpc::CallbackServerContext* context, const v1::GetDecodeInfoRequest*,
                                    v1::DecodeInfo*) override {
    Span span(tracer_, "decode.info", AcceptTrace(tracer_, *context), SpanKind::kServer);
    auto* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

 private:
  const Tracer tracer_{std::make_shared<NullSink>(), 0};
};

void Call(benchmark::State& state, bool with_trace) {
  Echo service;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  const auto stub =
      v1::Decode::NewStub(grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials()));
  const TraceContext trace = Tracer::None().MakeChild(Tracer::None().Accept(""));
  for (auto _ : state) {
    grpc::ClientContext context;
    if (with_trace) AddTrace(context, trace);
    v1::DecodeInfo info;
    if (!stub->GetInfo(&context, {}, &info).ok()) state.SkipWithError("the call failed");
  }
  server->Shutdown();
}

BENCHMARK_CAPTURE(SpansOfARequest, not_sampled, 0.0);
BENCHMARK_CAPTURE(SpansOfARequest, sampled, 1.0);
BENCHMARK_CAPTURE(Call, without, false)->UseRealTime()->Repetitions(9)->ReportAggregatesOnly();
BENCHMARK_CAPTURE(Call, with_trace, true)->UseRealTime()->Repetitions(9)->ReportAggregatesOnly();

}  // namespace

BENCHMARK_MAIN();
