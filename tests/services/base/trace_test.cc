#include "services/base/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <thread>

#include "services/base/ids.h"
#include "tests/support/seeded_random.h"

namespace spl {
namespace {

using namespace std::chrono_literals;

constexpr char kGood[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

class KeepingSink final : public SpanSink {
 public:
  void Take(SpanData span) override { spans.push_back(std::move(span)); }
  std::vector<SpanData> spans;
};

TEST(TraceParentTest, ReadsTheStandardsExample) {
  const auto context = ParseTraceParent(kGood, "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7");
  ASSERT_TRUE(context.has_value());
  EXPECT_EQ(context->TraceIdHex(), "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(HexEncode(context->span_id), "00f067aa0ba902b7");
  EXPECT_TRUE(context->sampled);
  EXPECT_EQ(context->state, "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7");
  EXPECT_EQ(context->ToTraceParent(), kGood);
}

TEST(TraceParentTest, OnlyTheSampledFlagCounts) {
  const std::string start = std::string(kGood).substr(0, 53);
  EXPECT_FALSE(ParseTraceParent(start + "00")->sampled);
  EXPECT_FALSE(ParseTraceParent(start + "fe")->sampled);
  EXPECT_TRUE(ParseTraceParent(start + "03")->sampled);
  EXPECT_EQ(ParseTraceParent(start + "03")->ToTraceParent(), kGood);  // flags that nobody here knows are not passed on
}

TEST(TraceParentTest, LaterVersionsMayHaveMore) {
  const std::string later = "01" + std::string(kGood).substr(2);
  EXPECT_TRUE(ParseTraceParent(later).has_value());
  EXPECT_TRUE(ParseTraceParent(later + "-what-comes").has_value());
  EXPECT_FALSE(ParseTraceParent(later + "what-comes").has_value());
  EXPECT_EQ(ParseTraceParent(later)->ToTraceParent(), kGood);
}

TEST(TraceParentTest, MalformedOnesAreNone) {
  for (const std::string& bad : {
           std::string(""),
           std::string("00"),
           std::string(kGood) + "-",
           std::string(kGood) + "0",
           std::string("ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
           std::string("00-00000000000000000000000000000000-00f067aa0ba902b7-01"),
           std::string("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01"),
           std::string("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01"),
           std::string("00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-01"),
           std::string("00_4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
           std::string("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0x"),
           std::string("0x-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
       }) {
    EXPECT_FALSE(ParseTraceParent(bad).has_value()) << bad;
    const TraceContext fresh = Tracer().Accept(bad);
    EXPECT_TRUE(fresh.valid());
    EXPECT_NE(fresh.TraceIdHex(), "4bf92f3577b34da6a3ce929d0e0e4736") << bad;
  }
}

TEST(TraceParentTest, AStateThatIsNotHarmlessIsDropped) {
  EXPECT_EQ(ParseTraceParent(kGood, std::string(513, 'a'))->state, "");
  EXPECT_EQ(ParseTraceParent(kGood, "a=b\r\nx-admin: 1")->state, "");
  EXPECT_EQ(ParseTraceParent(kGood, std::string(512, 'a'))->state.size(), 512U);
}

// Property: what is written is read as it was; what differs in any one character is either read as another context or
// not at all, and never makes trouble.
TEST(TraceParentTest, RoundTripsAndSurvivesDamage) {
  auto random = spl::test::SeededRandom("TraceParentTest.RoundTripsAndSurvivesDamage");
  for (int i = 0; i < 2000; ++i) {
    TraceContext context;
    for (uint8_t& byte : context.trace_id) byte = static_cast<uint8_t>(random());
    for (uint8_t& byte : context.span_id) byte = static_cast<uint8_t>(random());
    context.trace_id[3] |= 1;
    context.span_id[5] |= 1;
    context.sampled = random() % 2 == 0;
    std::string text = context.ToTraceParent();
    const auto read = ParseTraceParent(text);
    ASSERT_TRUE(read.has_value()) << text;
    EXPECT_EQ(read->trace_id, context.trace_id);
    EXPECT_EQ(read->span_id, context.span_id);
    EXPECT_EQ(read->sampled, context.sampled);
    const size_t at = random() % text.size();
    text[at] = static_cast<char>(random());
    if (const auto damaged = ParseTraceParent(text)) {
      EXPECT_TRUE(damaged->valid());
      EXPECT_TRUE(ParseTraceParent(damaged->ToTraceParent()).has_value());
    }
  }
}

TEST(TracerTest, FollowsTheParentsDecisionAndDrawsItsOwn) {
  const auto sink = std::make_shared<KeepingSink>();
  const Tracer never(sink, 0), always(sink, 1), without;
  EXPECT_TRUE(never.Accept(kGood).sampled);
  EXPECT_FALSE(always.Accept(std::string(kGood).substr(0, 53) + "00").sampled);
  EXPECT_FALSE(never.Accept("").sampled);
  EXPECT_TRUE(always.Accept("").sampled);
  EXPECT_FALSE(without.Accept("").sampled);
  EXPECT_FALSE(without.Records(without.Accept(kGood)));
  const Tracer half(sink, 0.5);
  int sampled = 0;
  for (int i = 0; i < 2000; ++i) sampled += half.Accept("").sampled;
  EXPECT_GT(sampled, 850);  // 6.7 standard deviations
  EXPECT_LT(sampled, 1150);
}

TEST(TracerTest, IdsAreDifferentOnAllThreads) {
  std::set<std::string> ids;
  std::mutex mutex;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        const std::string id = Tracer::None().Accept("").TraceIdHex();
        std::lock_guard lock(mutex);
        ids.insert(id);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ids.size(), 2000U);
}

TEST(SpanTest, ParentsAndChildren) {
  const auto sink = std::make_shared<KeepingSink>();
  const Tracer tracer(sink, 1);
  const TraceContext root = tracer.Accept("");
  const auto start = std::chrono::steady_clock::now();
  {
    Span request(tracer, "request", root, SpanKind::kServer, start - 50ms);
    Span call(tracer, "call", request.context(), SpanKind::kClient);
    call.Set("worker", "p0");
    call.Set("tokens", int64_t{7});
    call.SetStatus(absl::UnavailableError("gone"));
    Span moved = std::move(call);
    moved.End();
    moved.End();
  }
  ASSERT_EQ(sink->spans.size(), 2U);
  const SpanData &call = sink->spans[0], &request = sink->spans[1];
  EXPECT_EQ(call.name, "call");
  EXPECT_EQ(call.parent_id, request.context.span_id);
  EXPECT_EQ(call.context.trace_id, request.context.trace_id);
  EXPECT_EQ(call.kind, SpanKind::kClient);
  EXPECT_EQ(call.attributes.size(), 2U);
  EXPECT_EQ(call.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ((request.parent_id), (std::array<uint8_t, 8>{}));
  EXPECT_GE(request.end_unix_ns - request.start_unix_ns, 50'000'000);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  EXPECT_NEAR(static_cast<double>(request.end_unix_ns),
              static_cast<double>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()), 5e9);
}

TEST(SpanTest, WhatIsNotSampledIsNotRecordedButTravels) {
  const auto sink = std::make_shared<KeepingSink>();
  const Tracer tracer(sink, 0);
  const TraceContext root = tracer.Accept("");
  Span request(tracer, "request", root);
  EXPECT_FALSE(request.recording());
  // A new trace has to have a parent id all the same.
  const auto sent = ParseTraceParent(request.context().ToTraceParent());
  ASSERT_TRUE(sent.has_value());
  EXPECT_EQ(sent->trace_id, root.trace_id);
  EXPECT_FALSE(sent->sampled);
  // Below it nothing changes any more.
  const Span call(tracer, "call", request.context());
  EXPECT_EQ(call.context().ToTraceParent(), request.context().ToTraceParent());
  request.End();
  EXPECT_TRUE(sink->spans.empty());
}

TEST(TraceScopeTest, NestsAndEnds) {
  EXPECT_FALSE(CurrentTrace().valid());
  const TraceContext outer = Tracer::None().Accept(""), inner = Tracer::None().Accept("");
  {
    const TraceScope a(outer);
    {
      const TraceScope b(inner);
      EXPECT_EQ(CurrentTrace().trace_id, inner.trace_id);
      std::thread([] { EXPECT_FALSE(CurrentTrace().valid()); }).join();
    }
    EXPECT_EQ(CurrentTrace().trace_id, outer.trace_id);
  }
  EXPECT_FALSE(CurrentTrace().valid());
}

}  // namespace
}  // namespace spl
