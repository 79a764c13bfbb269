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
  std::string endpoint;      // http://HOST:PORT[/PATH] of the collector; empty: nothing is recorded
  double sample_ratio = 0;   // share of requests without a traceparent to record; a traceparent says it for its own
  size_t max_queued = 8192;  // spans that may wait to be sent; more are dropped
  size_t max_batch = 512;    // spans per call
  std::chrono::milliseconds interval{1'000};  // longest wait of a span for others to join its call
  std::chrono::milliseconds timeout{5'000};   // per call to the collector
  // Pause after a failure, in which nothing is tried: a collector that is down costs next to nothing.
  std::chrono::milliseconds pause{5'000};

  // Adds --otlp-endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) and --trace-sample. This object must outlive `app`.
  void Register(CLI::App& app);
};

// Makes a tracer for a program, with an exporter that lives as long. `program`: service.name, for example
// "splice-router"; `instance`: service.instance.id. InvalidArgument: the endpoint is not an http:// address.
absl::StatusOr<std::unique_ptr<Tracer>> MakeTracer(const TraceOptions& options, const std::string& program,
                                                   const std::string& instance, Metrics& metrics);

// Owns a bounded queue and one thread that empties it. No request ever waits for it: spans that find the queue full, or
// that the collector did not take, are dropped and counted (splice_trace_spans_total{result="exported", "queue_full" or
// "not_sent"}). The destructor sends the queued spans once.
class OtlpExporter : public SpanSink {
 public:
  static absl::StatusOr<std::shared_ptr<OtlpExporter>> Start(const TraceOptions& options, const std::string& program,
                                                             const std::string& instance, Metrics& metrics);
};

// Encodes the body of one call.
std::string EncodeOtlp(const std::string& program, const std::string& instance, const std::vector<SpanData>& spans);

}  // namespace spl
