#include "services/base/otlp_exporter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "services/base/ids.h"
#include "tests/support/eventually.h"
#include "tests/support/otlp_collector.h"

namespace spl {
namespace {

using nlohmann::json;
using spl::test::Eventually;
using spl::testing::OtlpCollector;
using ::testing::HasSubstr;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr char kTraceParent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

double Count(Metrics& metrics, const char* result) {
  return metrics
      .Counter("splice_trace_spans_total", "Spans of sampled traces, by what became of them.", {{"result", result}})
      .Value();
}

TraceOptions Options(const std::string& endpoint) {
  return {.endpoint = endpoint, .sample_ratio = 1, .interval = 10ms, .timeout = 2'000ms, .pause = 50ms};
}

void End(const Tracer& tracer, int num) {
  for (int i = 0; i < num; ++i) Span(tracer, "span", tracer.Accept("")).End();
}

TEST(OtlpEncodingTest, IsTheStandardsJson) {
  SpanData span{.name = "prefill.run",
                .context = *ParseTraceParent(kTraceParent, "a=b"),
                .kind = SpanKind::kServer,
                .start_unix_ns = 1'544'712'660'000'000'000,
                .end_unix_ns = 1'544'712'661'000'000'000,
                .attributes = {{"text", "a \"b\""}, {"number", int64_t{1} << 60}, {"share", 0.5}, {"flag", true}},
                .status = absl::UnavailableError("gone")};
  span.parent_id = {1, 2, 3, 4, 5, 6, 7, 8};
  const json got = json::parse(EncodeOtlp("splice-prefill", "p0", {span}));
  const json want = json::parse(R"({"resourceSpans": [{
    "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "splice-prefill"}},
                                {"key": "service.instance.id", "value": {"stringValue": "p0"}}]},
    "scopeSpans": [{"scope": {"name": "splice"}, "spans": [{
      "traceId": "4bf92f3577b34da6a3ce929d0e0e4736", "spanId": "00f067aa0ba902b7", "parentSpanId": "0102030405060708",
      "traceState": "a=b", "name": "prefill.run", "kind": 2,
      "startTimeUnixNano": "1544712660000000000", "endTimeUnixNano": "1544712661000000000",
      "attributes": [{"key": "text", "value": {"stringValue": "a \"b\""}},
                     {"key": "number", "value": {"intValue": "1152921504606846976"}},
                     {"key": "share", "value": {"doubleValue": 0.5}},
                     {"key": "flag", "value": {"boolValue": true}}],
      "status": {"code": 2, "message": "UNAVAILABLE: gone"}}]}]}]})");
  EXPECT_EQ(got, want) << got.dump(1);
}

TEST(OtlpEncodingTest, NamesThatAreNoUtf8StayJson) {
  SpanData span{.name = "x", .context = *ParseTraceParent(kTraceParent), .attributes = {{"caller", "\xff\xfe"}}};
  EXPECT_FALSE(json::parse(EncodeOtlp("p", "i", {span}), nullptr, false).is_discarded());
}

TEST(OtlpExporterTest, SendsInBatches) {
  OtlpCollector collector;
  Metrics metrics;
  TraceOptions options = Options(collector.endpoint() + "/");
  options.max_batch = 100;
  options.interval = 200ms;
  auto tracer = MakeTracer(options, "splice-test", "i0", metrics);
  ASSERT_TRUE(tracer.ok()) << tracer.status();
  End(**tracer, 950);
  EXPECT_TRUE(Eventually([&] { return collector.spans().size() == 950; })) << collector.spans().size();
  EXPECT_LE(collector.num_calls(), 20);
  EXPECT_EQ(collector.problems(), "");
  EXPECT_EQ(collector.spans()[0].program, "splice-test");
  EXPECT_TRUE(Eventually([&] { return Count(metrics, "exported") == 950; }));
  EXPECT_EQ(Count(metrics, "queue_full") + Count(metrics, "not_sent"), 0);
}

TEST(OtlpExporterTest, TheEndSendsWhatIsQueued) {
  OtlpCollector collector;
  Metrics metrics;
  TraceOptions options = Options(collector.endpoint());
  options.interval = 1h;
  auto tracer = MakeTracer(options, "splice-test", "i0", metrics);
  ASSERT_TRUE(tracer.ok());
  End(**tracer, 3);
  tracer->reset();
  EXPECT_EQ(collector.spans().size(), 3U);
}

// Nobody listens: spans are dropped and counted, and whoever makes them does not notice.
TEST(OtlpExporterTest, ADeadCollectorCostsNothing) {
  std::string endpoint;
  {
    OtlpCollector gone;
    endpoint = gone.endpoint();
  }
  Metrics metrics;
  auto tracer = MakeTracer(Options(endpoint), "splice-test", "i0", metrics);
  ASSERT_TRUE(tracer.ok());
  End(**tracer, 10);
  EXPECT_TRUE(Eventually([&] { return Count(metrics, "not_sent") == 10; }));
}

// One that takes the connection and never answers: the queue fills and stays bounded.
TEST(OtlpExporterTest, ASilentCollectorFillsABoundedQueue) {
  OtlpCollector collector;
  collector.AnswerWith(0);
  Metrics metrics;
  TraceOptions options = Options(collector.endpoint());
  options.max_queued = 100;
  options.max_batch = 10;
  options.timeout = 500ms;
  auto tracer = MakeTracer(options, "splice-test", "i0", metrics);
  ASSERT_TRUE(tracer.ok());
  End(**tracer, 10);
  ASSERT_TRUE(Eventually([&] { return collector.num_calls() == 1; }));
  const auto start = Clock::now();
  End(**tracer, 1000);
  EXPECT_LT(Clock::now() - start, 200ms);  // shorter than one call
  EXPECT_GE(Count(metrics, "queue_full"), 880);
  // It comes back: what is still queued is sent.
  collector.AnswerWith(200);
  EXPECT_TRUE(Eventually([&] { return Count(metrics, "exported") > 0; }));
  tracer->reset();
  EXPECT_EQ(Count(metrics, "queue_full") + Count(metrics, "not_sent") + Count(metrics, "exported"), 1010);
}

TEST(OtlpExporterTest, ARefusalIsNotRepeated) {
  OtlpCollector collector;
  collector.AnswerWith(503);
  Metrics metrics;
  auto tracer = MakeTracer(Options(collector.endpoint()), "splice-test", "i0", metrics);
  ASSERT_TRUE(tracer.ok());
  End(**tracer, 4);
  EXPECT_TRUE(Eventually([&] { return Count(metrics, "not_sent") == 4; }));
  EXPECT_EQ(collector.num_calls(), 1);
}

TEST(OtlpExporterTest, OffWithoutAnEndpoint) {
  Metrics metrics;
  const auto tracer = MakeTracer({.sample_ratio = 1}, "splice-test", "i0", metrics);
  ASSERT_TRUE(tracer.ok());
  EXPECT_FALSE((*tracer)->Records((*tracer)->Accept(kTraceParent)));
}

TEST(OtlpExporterTest, EndpointsThatAreNone) {
  Metrics metrics;
  for (const char* bad : {"collector:4318", "https://collector:4318", "http://", "http://host:port", "http://:4318"}) {
    const auto tracer = MakeTracer({.endpoint = bad}, "splice-test", "i0", metrics);
    EXPECT_EQ(tracer.status().code(), absl::StatusCode::kInvalidArgument) << bad << ": " << tracer.status();
    EXPECT_THAT(std::string(tracer.status().message()), HasSubstr("--otlp-endpoint")) << bad;
  }
  EXPECT_TRUE(MakeTracer({.endpoint = "http://127.0.0.1"}, "splice-test", "i0", metrics).ok());  // port 4318
}

TEST(OtlpExporterTest, TheEnvironmentNamesTheEndpoint) {
  ::setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://from-the-environment:4318", 1);
  TraceOptions options;
  CLI::App app;
  options.Register(app);
  app.parse("--trace-sample 0.25");
  EXPECT_EQ(options.endpoint, "http://from-the-environment:4318");
  EXPECT_EQ(options.sample_ratio, 0.25);
  TraceOptions other;
  CLI::App second;
  other.Register(second);
  second.parse("--otlp-endpoint http://from-a-flag:1");
  EXPECT_EQ(other.endpoint, "http://from-a-flag:1");
  CLI::App third;
  TraceOptions refused;
  refused.Register(third);
  EXPECT_THROW(third.parse("--trace-sample 1.5"), CLI::ParseError);
  ::unsetenv("OTEL_EXPORTER_OTLP_ENDPOINT");
}

}  // namespace
}  // namespace spl
