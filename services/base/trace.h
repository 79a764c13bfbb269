// Distributed traces: the context that travels with a request (W3C Trace Context,
// https://www.w3.org/TR/trace-context/), and spans: pieces of a program's work for the request, with their times.
// Independent of the wire: grpc_trace.h has gRPC metadata, otlp_exporter.h the export.
//
//   Span span(tracer, "router.reserve", parent, SpanKind::kClient);
//   ... pass span.context() on ...
//   span.Set("splice.worker", worker_id);
//   span.End();                                    // or its destructor
//
// The program that begins a trace decides whether it is sampled. Spans of an unsampled trace record nothing, carry the
// id of their parent, and cost a comparison.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"

namespace spl {

// The identity of a span, as its children see it. A default one is invalid: no context.
struct TraceContext {
  std::array<uint8_t, 16> trace_id{};
  std::array<uint8_t, 8> span_id{};
  bool sampled = false;
  std::string state;  // tracestate, passed on unchanged

  bool valid() const { return trace_id != std::array<uint8_t, 16>{}; }
  std::string TraceIdHex() const;     // 32 lower-case digits; "" unless valid
  std::string ToTraceParent() const;  // "00-<trace id>-<span id>-<flags>"; "" unless valid
};

// Nothing: the standard calls the text invalid (wrong lengths, upper case, zeros, version ff). Reads the known
// fields of versions above 00. Drops a tracestate of more than 512 bytes, or with characters other than printable
// ASCII.
std::optional<TraceContext> ParseTraceParent(std::string_view traceparent, std::string_view tracestate = {});

enum class SpanKind : uint8_t { kInternal = 1, kServer = 2, kClient = 3 };  // OTLP's numbers

using SpanValue = std::variant<std::string, int64_t, double, bool>;

struct SpanData {
  std::string name;
  TraceContext context;                // the span's own
  std::array<uint8_t, 8> parent_id{};  // zeros: root span
  SpanKind kind = SpanKind::kInternal;
  int64_t start_unix_ns = 0, end_unix_ns = 0;
  std::vector<std::pair<std::string, SpanValue>> attributes;
  absl::Status status;
};

// The destination of finished spans. Thread-safe; takes or drops a span, but never waits.
class SpanSink {
 public:
  virtual ~SpanSink() = default;
  virtual void Take(SpanData span) = 0;
};

// One per program. Thread-safe.
class Tracer {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `sample_ratio`: share of the traces begun here that are recorded. `sink` null: nothing is recorded here and traces
  // begun here are not sampled; contexts still travel.
  explicit Tracer(std::shared_ptr<SpanSink> sink = nullptr, double sample_ratio = 0);

  // The context that a request came with, or one of a new trace, which has a trace id and no span yet.
  TraceContext Accept(std::string_view traceparent, std::string_view tracestate = {}) const;

  bool Records(const TraceContext& context) const { return sink_ != nullptr && context.sampled; }
  // A context with a span id of its own, to be passed to Record later. Returns the parent itself if nothing is
  // recorded.
  TraceContext MakeChild(const TraceContext& parent) const;
  // A finished span; `context` comes from MakeChild. Ignored if it is not recorded.
  struct Finished {
    std::string_view name;
    SpanKind kind = SpanKind::kInternal;
    Time start, end;
    std::vector<std::pair<std::string, SpanValue>> attributes = {};
    absl::Status status = {};
  };
  void Record(const TraceContext& context, const TraceContext& parent, Finished span) const;
  // The same with a fresh span id, for spans without children.
  void Record(const TraceContext& parent, Finished span) const { Record(MakeChild(parent), parent, std::move(span)); }

  // A tracer that records nothing; lives for ever.
  static const Tracer& None();

 private:
  const std::shared_ptr<SpanSink> sink_;
  const double sample_ratio_;
};

// One span, from construction to End. Movable; used by one thread at a time. The tracer must outlive it. A default one
// does nothing.
class Span {
 public:
  using Time = Tracer::Time;

  Span() = default;
  Span(const Tracer& tracer, std::string_view name, const TraceContext& parent, SpanKind kind = SpanKind::kInternal,
       Time start = std::chrono::steady_clock::now());
  Span(Span&& other) noexcept { *this = std::move(other); }
  Span& operator=(Span&& other) noexcept;
  ~Span() { End(); }

  const TraceContext& context() const { return context_; }
  bool recording() const { return recording_ != nullptr; }
  void Set(std::string_view key, SpanValue value);
  // Marks the span as failed, unless the status is OK.
  void SetStatus(const absl::Status& status);
  void End(Time end = std::chrono::steady_clock::now());  // idempotent

 private:
  struct Recording {
    const Tracer* tracer;
    TraceContext parent;
    std::string name;
    Tracer::Finished finished;
  };
  TraceContext context_;
  std::unique_ptr<Recording> recording_;  // null: nothing is recorded
};

// The trace context of the current thread, for code behind interfaces that have no parameter for one (chunk stores).
// Invalid unless a TraceScope is open.
const TraceContext& CurrentTrace();

// Sets CurrentTrace() until the end of the block. `context` must live as long.
class TraceScope {
 public:
  explicit TraceScope(const TraceContext& context);
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;
  ~TraceScope();

 private:
  const TraceContext* const previous_;
};

}  // namespace spl
