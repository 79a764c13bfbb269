// The load generator against a router over fake workers.
#include "tools/cli/load_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tests/support/fake_cluster.h"
#include "tools/cli/load_report.h"

namespace spl::cli {
namespace {

using testing::FakeCluster;

LoadOptions OptionsFor(const FakeCluster& cluster) {
  LoadOptions options;
  options.endpoint = ParseApiUrl("http://" + cluster.http()).value();
  return options;
}

LoadPlanOptions PlanOptions() {
  return {.alphabet = {300, 301, 302, 303}, .input_tokens = 32, .output_tokens = 10, .num_requests = 40};
}

TEST(LoadClientTest, ClosedLoopFinishesEveryRequest) {
  FakeCluster cluster(1, 1);
  cluster.StartRouter();
  LoadOptions options = OptionsFor(cluster);
  options.concurrency = 8;
  int progress = 0;
  const LoadOutcome outcome =
      RunLoad(options, MakeSyntheticPlan(PlanOptions()), [&](const LoadProgress&) { ++progress; }).value();
  ASSERT_EQ(outcome.results.size(), 40u);
  for (const RequestResult& r : outcome.results) {
    EXPECT_EQ(r.error, "");
    EXPECT_EQ(r.prompt_tokens, 32u);
    EXPECT_EQ(r.completion_tokens, 10u);
    EXPECT_EQ(r.cached_tokens, 64u);
    EXPECT_GT(r.first_token_s, r.scheduled_s);
    EXPECT_GE(r.last_token_s, r.first_token_s);
    EXPECT_GE(r.end_s, r.last_token_s);
  }
  EXPECT_GE(progress, 1);
}

TEST(LoadClientTest, OpenLoopStartsAtThePlannedTimes) {
  FakeCluster cluster(1, 1);
  cluster.StartRouter();
  LoadOptions options = OptionsFor(cluster);
  options.open_loop = true;
  options.concurrency = 100;
  LoadPlanOptions plan_options = PlanOptions();
  plan_options.rate_per_s = 400;
  const std::vector<PlannedRequest> plan = MakeSyntheticPlan(plan_options);
  const LoadOutcome outcome = RunLoad(options, plan, nullptr).value();
  for (size_t i = 0; i < plan.size(); ++i) {
    EXPECT_DOUBLE_EQ(outcome.results[i].scheduled_s, std::chrono::duration<double>(plan[i].at).count());
    EXPECT_GT(outcome.results[i].first_token_s, outcome.results[i].scheduled_s);
  }
}

TEST(LoadClientTest, FailuresAreCountedWithTheServersWords) {
  FakeCluster cluster(1, 1);
  cluster.options.dispatch.admission.max_queue = 0;
  cluster.StartRouter();
  cluster.decode[0]->SetFull(true);
  const LoadReport report =
      MakeReport(RunLoad(OptionsFor(cluster), MakeSyntheticPlan(PlanOptions()), nullptr).value(), {});
  EXPECT_EQ(report.num_ok, 0u);
  ASSERT_EQ(report.errors.size(), 1u);
  EXPECT_THAT(report.errors.begin()->first, ::testing::HasSubstr("HTTP 429: the cluster is full"));
  EXPECT_EQ(report.errors.begin()->second, 40u);
}

TEST(LoadClientTest, BrokenStreamIsAFailure) {
  FakeCluster cluster(1, 1);
  cluster.options.dispatch.max_migrations = 0;
  cluster.options.dispatch.max_attempts = 1;  // the loss may come before the first token has reached the router
  cluster.StartRouter();
  cluster.decode[0]->SetGate(5);
  LoadPlanOptions plan = PlanOptions();
  plan.num_requests = 1;
  std::thread breaker([&] {
    EXPECT_TRUE(cluster.decode[0]->WaitFor([](const auto& c) { return c.commits == 1; }));
    cluster.decode[0]->BreakStreams(grpc::Status(grpc::StatusCode::UNAVAILABLE, "lost"));
  });
  const LoadOutcome outcome = RunLoad(OptionsFor(cluster), MakeSyntheticPlan(plan), nullptr).value();
  breaker.join();
  // Before the router has opened the stream, the loss is that of the ticket.
  EXPECT_THAT(outcome.results[0].error,
              ::testing::AnyOf(::testing::HasSubstr("lost"), ::testing::HasSubstr("no such ticket")));
}

// Ctrl-C: the run ends at once, and what was finished is kept.
TEST(LoadClientTest, AStoppedRunKeepsWhatWasFinished) {
  FakeCluster cluster(1, 1);
  cluster.StartRouter();
  LoadPlanOptions plan = PlanOptions();
  plan.num_requests = 20'000;
  std::atomic<bool> stop{false};
  LoadOptions options = OptionsFor(cluster);
  options.stop = &stop;
  LoadProgress last;
  const auto outcome = RunLoad(options, MakeSyntheticPlan(plan), [&](const LoadProgress& progress) {
    last = progress;
    if (progress.finished > 0) stop = true;
  });
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_TRUE(outcome->stopped);
  EXPECT_GT(outcome->results.size(), 0u);
  EXPECT_LT(outcome->results.size(), 20'000u);
  EXPECT_NEAR(static_cast<double>(outcome->results.size()), last.finished, options.concurrency);
  EXPECT_EQ(MakeReport(*outcome, {}).num_ok, outcome->results.size());
}

TEST(LoadClientTest, NobodyThere) {
  LoadOptions options;
  options.endpoint = ParseApiUrl("http://127.0.0.1:1").value();
  LoadPlanOptions plan = PlanOptions();
  plan.num_requests = 2;
  const LoadOutcome outcome = RunLoad(options, MakeSyntheticPlan(plan), nullptr).value();
  EXPECT_THAT(outcome.results[1].error, ::testing::HasSubstr("connect"));
  EXPECT_EQ(FetchJson(options, "GET", "/v1/models", "").status().code(), absl::StatusCode::kUnavailable);
}

TEST(HttpUrlTest, Forms) {
  EXPECT_EQ(ParseApiUrl("http://h:8000/").value().HostHeader(), "h:8000");
  EXPECT_EQ(ParseApiUrl("h:1/v1").value().path, "");
  EXPECT_EQ(ParseApiUrl("http://h:1/proxy/v1/").value().path, "/proxy");
  EXPECT_EQ(ParseApiUrl("http://h").value().port, "80");
  EXPECT_EQ(ParseApiUrl("http://[::1]:8000").value().host, "::1");
  EXPECT_EQ(ParseApiUrl("http://[::1]:8000").value().HostHeader(), "[::1]:8000");
  EXPECT_FALSE(ParseApiUrl("http://h:1").value().https);
  EXPECT_TRUE(ParseApiUrl("https://h:1").value().https);
  EXPECT_EQ(ParseApiUrl("https://h/v1").value().HostHeader(), "h:443");
  for (const char* bad : {"", "http://", "https://", "grpc://h:1", "http://h:", "http://h:x", "http://h:99999"}) {
    EXPECT_FALSE(ParseApiUrl(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace spl::cli
