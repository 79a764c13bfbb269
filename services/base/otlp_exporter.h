// Sends spans to an OpenTelemetry collector: OTLP over HTTP, JSON encoding (ExportTraceServiceRequest,
// https://opentelemetry.io/docs/specs/otlp/), to ENDPOINT/v1/traces.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/metrics.h"
#include "services/base/trace.h"

namespace CLI {
class App;
}

namespace spl {

struct TraceOptions {
  std::string endpoint;                       // http://HOST:PORT[/PATH] of the collector; empty: nothing is recorded
  double sample_ratio = 0;                    // of the requests that come without a traceparent; others say themselves
  size_t max_queued = 8192;                   // spans that wait to be sent; more are dropped
  size_t max_batch = 512;                     // spans of one call
  std::chrono::milliseconds interval{1'000};  // spans wait this long for others
  std::chrono::milliseconds timeout{5'000};   // of one call to the collector
  // Nothing is tried for this long after a failure: a collector that is down costs next to nothing.
  std::chrono::milliseconds pause{5'000};

  // Adds --otlp-endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) and --trace-sample. `app` is done before this goes.
  void Register(CLI::App& app);
};

// A tracer for a program and its exporter, which lives as long. `program`: service.name, for example "splice-router";
// `instance`: service.instance.id. InvalidArgument: the endpoint is no http:// address.
absl::StatusOr<std::unique_ptr<Tracer>> MakeTracer(const TraceOptions& options, const std::string& program,
                                                   const std::string& instance, Metrics& metrics);

// Owns a bounded queue and one thread that empties it. Nobody who takes part in a request ever waits for it: spans that
// find the queue full, or that the collector did not take, are dropped and counted
// (splice_trace_spans_total{result="exported", "queue_full" or "not_sent"}). The end sends what is queued, once.
class OtlpExporter : public SpanSink {
 public:
  static absl::StatusOr<std::shared_ptr<OtlpExporter>> Start(const TraceOptions& options, const std::string& program,
                                                             const std::string& instance, Metrics& metrics);
};

// The body of one call.
std::string EncodeOtlp(const std::string& program, const std::string& instance, const std::vector<SpanData>& spans);

}  // namespace spl
