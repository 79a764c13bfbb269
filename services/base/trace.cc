#include "services/base/trace.h"

#include <algorithm>
#include <random>

#include "services/base/ids.h"

namespace spl {
namespace {

constexpr size_t kMaxStateBytes = 512;  // minimum that every participant must pass on (section 3.3.1.5)
constexpr uint8_t kSampledFlag = 1;

bool IsLowerHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

// Converts text for which IsLowerHex holds.
template <size_t kBytes>
std::array<uint8_t, kBytes> FromHex(std::string_view text) {
  const auto digit = [](char c) { return static_cast<uint8_t>(c <= '9' ? c - '0' : c - 'a' + 10); };
  std::array<uint8_t, kBytes> out{};
  for (size_t i = 0; i < kBytes; ++i) out[i] = static_cast<uint8_t>(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
  return out;
}

// Ids need to be different, not secret: a generator a thread, seeded by the kernel's.
std::mt19937_64& Random() {
  thread_local std::mt19937_64 random = [] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }();
  return random;
}

template <size_t kBytes>
void FillRandom(std::array<uint8_t, kBytes>& id) {
  do {
    for (size_t i = 0; i < kBytes; i += 8) {
      const uint64_t bits = Random()();
      for (size_t b = 0; b < 8; ++b) id[i + b] = static_cast<uint8_t>(bits >> (8 * b));
    }
  } while (id == std::array<uint8_t, kBytes>{});  // means none
}

// By the clock that people read, as it stands now.
int64_t UnixNanos(Tracer::Time time) {
  const auto ago = std::chrono::steady_clock::now() - time;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             (std::chrono::system_clock::now() - ago).time_since_epoch())
      .count();
}

thread_local const TraceContext* current_trace = nullptr;

}  // namespace

std::string TraceContext::TraceIdHex() const { return valid() ? HexEncode(trace_id) : ""; }

std::string TraceContext::ToTraceParent() const {
  if (!valid()) return "";
  return "00-" + HexEncode(trace_id) + "-" + HexEncode(span_id) + (sampled ? "-01" : "-00");
}

std::optional<TraceContext> ParseTraceParent(std::string_view text, std::string_view tracestate) {
  // version "-" trace-id "-" parent-id "-" flags, and "-" more of later versions
  constexpr size_t kLength = 55;
  if (text.size() < kLength || text[2] != '-' || text[35] != '-' || text[52] != '-') return std::nullopt;
  const std::string_view version = text.substr(0, 2), trace = text.substr(3, 32), parent = text.substr(36, 16),
                         flags = text.substr(53, 2);
  if (!IsLowerHex(version) || !IsLowerHex(trace) || !IsLowerHex(parent) || !IsLowerHex(flags) || version == "ff")
    return std::nullopt;
  if (version == "00" ? text.size() != kLength : text.size() > kLength && text[kLength] != '-') return std::nullopt;
  TraceContext context;
  context.trace_id = FromHex<16>(trace);
  context.span_id = FromHex<8>(parent);
  if (!context.valid() || context.span_id == std::array<uint8_t, 8>{}) return std::nullopt;
  context.sampled = (FromHex<1>(flags)[0] & kSampledFlag) != 0;
  const bool printable = std::all_of(tracestate.begin(), tracestate.end(), [](char c) { return c >= ' ' && c <= '~'; });
  if (printable && tracestate.size() <= kMaxStateBytes) context.state = tracestate;
  return context;
}

Tracer::Tracer(std::shared_ptr<SpanSink> sink, double sample_ratio)
    : sink_(std::move(sink)), sample_ratio_(sample_ratio) {}

const Tracer& Tracer::None() {
  static const auto* const none = new Tracer;
  return *none;
}

TraceContext Tracer::Accept(std::string_view traceparent, std::string_view tracestate) const {
  if (std::optional<TraceContext> given = ParseTraceParent(traceparent, tracestate)) return *std::move(given);
  TraceContext context;
  FillRandom(context.trace_id);
  if (sink_ != nullptr) context.sampled = std::uniform_real_distribution<double>()(Random()) < sample_ratio_;
  return context;
}

TraceContext Tracer::MakeChild(const TraceContext& parent) const {
  TraceContext child = parent;
  // A trace that is begun here must have a parent id, recorded or not, or its context could not be passed on.
  if (Records(parent) || (parent.valid() && parent.span_id == std::array<uint8_t, 8>{})) FillRandom(child.span_id);
  return child;
}

void Tracer::Record(const TraceContext& context, const TraceContext& parent, Finished span) const {
  if (!Records(context)) return;
  sink_->Take({.name = std::string(span.name),
               .context = context,
               .parent_id = parent.span_id,
               .kind = span.kind,
               .start_unix_ns = UnixNanos(span.start),
               .end_unix_ns = UnixNanos(std::max(span.start, span.end)),
               .attributes = std::move(span.attributes),
               .status = std::move(span.status)});
}

Span::Span(const Tracer& tracer, std::string_view name, const TraceContext& parent, SpanKind kind, Time start)
    : context_(tracer.MakeChild(parent)) {
  if (!tracer.Records(parent)) return;
  recording_ = std::make_unique<Recording>(Recording{&tracer, parent, std::string(name), {}});
  recording_->finished.kind = kind;
  recording_->finished.start = start;
}

Span& Span::operator=(Span&& other) noexcept {
  if (this == &other) return *this;
  End();
  context_ = std::move(other.context_);
  recording_ = std::move(other.recording_);
  return *this;
}

void Span::Set(std::string_view key, SpanValue value) {
  if (recording_ != nullptr) recording_->finished.attributes.emplace_back(key, std::move(value));
}

void Span::SetStatus(const absl::Status& status) {
  if (recording_ != nullptr) recording_->finished.status = status;
}

void Span::End(Time end) {
  if (recording_ == nullptr) return;
  const std::unique_ptr<Recording> recording = std::move(recording_);
  recording->finished.name = recording->name;
  recording->finished.end = end;
  recording->tracer->Record(context_, recording->parent, std::move(recording->finished));
}

const TraceContext& CurrentTrace() {
  static const auto* const none = new TraceContext;
  return current_trace != nullptr ? *current_trace : *none;
}

TraceScope::TraceScope(const TraceContext& context) : previous_(current_trace) { current_trace = &context; }
TraceScope::~TraceScope() { current_trace = previous_; }

}  // namespace spl
