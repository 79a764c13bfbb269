// Workers that come and go, hang, keep failing or are killed by a request.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "services/router/admission/retry_budget.h"
#include "services/router/fleet/circuit_breaker.h"
#include "tests/support/eventually.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"
#include "tests/support/tcp_forwarder.h"

namespace spl::router {
namespace {

using nlohmann::json;
using testing::Call;
using testing::FakeCluster;
using testing::FakeDecode;
using testing::FakePrefill;
using testing::HttpTestClient;
using testing::TcpForwarder;
using testing::TestResponse;
using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

constexpr char kCompletions[] = "/v1/completions";

std::string Body(const std::string& prompt, int max_tokens, bool stream = false) {
  return json({{"prompt", prompt}, {"max_tokens", max_tokens}, {"stream", stream}}).dump();
}

// The list is what the test says.
class ScriptedDiscovery final : public membership::Discovery {
 public:
  void Start(OnChange on_change) override {
    on_change_ = std::move(on_change);
    on_change_(members_);
  }
  void Stop() override { on_change_ = nullptr; }
  std::string description() const override { return "scripted"; }

  void Add(membership::Role role, const std::string& address) {
    members_.push_back({.role = role, .address = address});
    membership::Normalize(members_);
    if (on_change_) on_change_(members_);
  }
  void Remove(const std::string& address) {
    std::erase_if(members_, [&](const auto& m) { return m.address == address; });
    if (on_change_) on_change_(members_);
  }

 private:
  OnChange on_change_;
  membership::Members members_;
};

void StartWith(FakeCluster& cluster, const std::shared_ptr<ScriptedDiscovery>& discovery) {
  cluster.options.dispatch.fleet.discovery = discovery;
  auto started = RouterServer::Start(cluster.options);
  ASSERT_TRUE(started.ok()) << started.status();
  cluster.router = std::move(*started);
}

size_t NumDecode(FakeCluster& cluster) { return cluster.router->dispatcher().fleet().snapshot()->decode.size(); }

double Metric(FakeCluster& cluster, const std::string& line_start) {
  const std::string text = Call(cluster.http(), "GET", "/metrics").body;
  const size_t at = text.find("\n" + line_start + " ");
  return at == std::string::npos ? -1 : std::stod(text.substr(at + line_start.size() + 2));
}

TEST(FleetTest, WorkersJoinAndLeaveWhileRequestsRun) {
  FakeCluster cluster(1, 2);
  auto discovery = std::make_shared<ScriptedDiscovery>();
  StartWith(cluster, discovery);
  EXPECT_FALSE(cluster.router->ready());
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, Body("x", 2)).status, 503);
  discovery->Add(membership::Role::kPrefill, cluster.prefill[0]->address());
  discovery->Add(membership::Role::kDecode, cluster.decode[0]->address());
  cluster.WaitForPairs(1, 1);
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, Body("x", 2)).status, 200);

  cluster.decode[0]->SetGate(10);
  HttpTestClient running(cluster.http());
  running.SendRequest("POST", kCompletions, Body("a stream that outlives its worker's membership", 30, true));
  ASSERT_EQ(running.ReadHead().status, 200);
  discovery->Add(membership::Role::kDecode, cluster.decode[1]->address());
  cluster.WaitForPairs(1, 2);
  discovery->Remove(cluster.decode[0]->address());
  ASSERT_TRUE(spl::test::Eventually([&] { return NumDecode(cluster) == 1; }));
  for (int i = 0; i < 3; ++i) {
    const TestResponse response = Call(cluster.http(), "POST", kCompletions, Body("y", 2));
    ASSERT_EQ(response.status, 200);
    EXPECT_EQ(json::parse(response.body).at("splice").at("workers").at("decode"), "d1");
  }
  // What runs on the one that left ends there.
  cluster.decode[0]->SetGate(UINT32_MAX);
  std::string last, before;
  while (auto event = running.NextEvent()) before = std::exchange(last, *event);
  EXPECT_EQ(last, "[DONE]");
  EXPECT_EQ(json::parse(before).at("splice").at("migrations"), 0);
  EXPECT_EQ(json::parse(before).at("splice").at("workers").at("decode"), "d0");
  // And it may come back.
  discovery->Add(membership::Role::kDecode, cluster.decode[0]->address());
  cluster.WaitForPairs(1, 2);
}

TEST(FleetTest, AWorkerThatLeftAndDiesStillLosesItsStreams) {
  FakeCluster cluster(1, 2);
  auto discovery = std::make_shared<ScriptedDiscovery>();
  discovery->Add(membership::Role::kPrefill, cluster.prefill[0]->address());
  discovery->Add(membership::Role::kDecode, cluster.decode[0]->address());
  StartWith(cluster, discovery);
  cluster.WaitForPairs(1, 1);
  cluster.decode[0]->SetGate(10);
  HttpTestClient running(cluster.http());
  running.SendRequest("POST", kCompletions, Body("moved after all", 30, true));
  ASSERT_EQ(running.ReadHead().status, 200);
  discovery->Add(membership::Role::kDecode, cluster.decode[1]->address());
  discovery->Remove(cluster.decode[0]->address());
  ASSERT_TRUE(spl::test::Eventually([&] {
    const auto fleet = cluster.router->dispatcher().fleet().snapshot();
    return fleet->decode.size() == 1 && fleet->decode[0].worker_id == "d1" && fleet->HasUsablePair();
  }));
  cluster.decode[0]->Kill();
  std::string last;
  while (auto event = running.NextEvent()) last = *event;
  EXPECT_EQ(last, "[DONE]");
}

TEST(FleetTest, AHangingWorkerIsLostWithinASecond) {
  FakeCluster cluster(1, 2);
  cluster.options.dispatch.fleet.poll_interval = 200ms;  // as in production
  TcpForwarder link(cluster.decode[0]->address());
  auto discovery = std::make_shared<ScriptedDiscovery>();
  discovery->Add(membership::Role::kPrefill, cluster.prefill[0]->address());
  discovery->Add(membership::Role::kDecode, link.address());
  StartWith(cluster, discovery);
  cluster.WaitForPairs(1, 1);
  cluster.decode[0]->SetGate(5);
  HttpTestClient running(cluster.http());
  running.SendRequest("POST", kCompletions, Body("its worker falls silent", 12, true));
  ASSERT_EQ(running.ReadHead().status, 200);
  discovery->Add(membership::Role::kDecode, cluster.decode[1]->address());
  cluster.WaitForPairs(1, 2);
  link.Drop();
  const auto start = SteadyClock::now();
  ASSERT_TRUE(spl::test::Eventually([&] { return NumDecode(cluster) == 1; }));
  ASSERT_TRUE(
      spl::test::Eventually([&] { return Metric(cluster, "splice_router_worker_silence_seconds_count") == 1; }));
  const double seconds = std::chrono::duration<double>(SteadyClock::now() - start).count();
  EXPECT_LT(seconds, 1.0);
  EXPECT_EQ(Metric(cluster, "splice_router_workers_lost_total{reason=\"silent\"}"), 1);
  std::string last;
  while (auto event = running.NextEvent()) last = *event;
  EXPECT_EQ(last, "[DONE]") << "the stream goes on elsewhere";
  // The link is mended: it is the same life, and well.
  link.Mend();
  cluster.WaitForPairs(1, 2);
}

TEST(FleetTest, ARequestThatKillsTwoWorkersIsNotTriedOnAThird) {
  FakeCluster cluster(3, 1);
  cluster.StartRouter();
  for (auto& p : cluster.prefill) p->Hold(true);
  HttpTestClient client(cluster.http());
  client.SendRequest("POST", kCompletions, Body("poison", 4));
  std::set<size_t> killed;
  for (int victim = 0; victim < 2; ++victim) {
    ASSERT_TRUE(spl::test::Eventually([&] {
      for (size_t i = 0; i < 3; ++i) {
        if (killed.contains(i) || cluster.prefill[i]->counters().waiting == 0) continue;
        killed.insert(i);
        cluster.prefill[i]->Kill();
        return true;
      }
      return false;
    }));
  }
  const TestResponse response = client.Read();
  EXPECT_EQ(response.status, 400) << response.body;
  EXPECT_EQ(json::parse(response.body).at("error").at("code"), "request_killed_workers");
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(cluster.prefill[i]->counters().runs, killed.contains(i) ? 1 : 0);
  EXPECT_EQ(Metric(cluster, "splice_router_poisoned_requests_total"), 1);
  for (size_t i = 0; i < 3; ++i) {
    if (!killed.contains(i)) cluster.prefill[i]->Hold(false);
  }
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, Body("harmless", 4)).status, 200);
}

TEST(FleetTest, WorkersThatRefuseAreNotKilled) {
  FakeCluster cluster(2, 1);
  cluster.StartRouter();
  for (auto& p : cluster.prefill) p->FailRuns(grpc::Status(grpc::StatusCode::UNAVAILABLE, "not now"), 1);
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, Body("x", 2)).status, 200);
}

TEST(FleetTest, AWorkerThatKeepsFailingIsLeftAloneAndProbed) {
  FakeCluster cluster(2, 1);
  cluster.options.dispatch.breaker = {.failures_to_open = 3, .open_time = 400ms};
  cluster.StartRouter();
  cluster.prefill[0]->FailRuns(grpc::Status(grpc::StatusCode::INTERNAL, "a bad device"), 1000);
  // Prompts of one beginning go where it was computed; new ones try both.
  for (int i = 0; cluster.prefill[0]->counters().runs < 3; ++i) {
    ASSERT_LT(i, 200);
    EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, Body("request " + std::to_string(i), 2)).status, 200);
  }
  EXPECT_EQ(Metric(cluster, "splice_router_breakers_open"), 1);
  cluster.prefill[0]->FailRuns(grpc::Status::OK, 0);
  for (int i = 0; i < 5; ++i)
    EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, Body("left alone " + std::to_string(i), 2)).status, 200);
  const int runs = cluster.prefill[0]->counters().runs;
  EXPECT_EQ(runs, 3);
  ASSERT_TRUE(spl::test::Eventually([&] {
    Call(cluster.http(), "POST", kCompletions, Body("probe " + std::to_string(random()), 2));
    return cluster.prefill[0]->counters().runs > runs;
  }));
  ASSERT_TRUE(spl::test::Eventually([&] { return Metric(cluster, "splice_router_breakers_open") == 0; }));
}

TEST(FleetTest, RetriesEndWithTheBudget) {
  FakeCluster cluster(2, 1);
  cluster.options.dispatch.retry_budget = {.per_request = 0, .per_second = 0, .most = 2};
  cluster.StartRouter();
  for (auto& p : cluster.prefill) p->FailRuns(grpc::Status(grpc::StatusCode::INTERNAL, "bug"), 1000);
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, Body("uses it up", 2)).status, 503);
  const int runs = cluster.prefill[0]->counters().runs + cluster.prefill[1]->counters().runs;
  EXPECT_EQ(runs, 3);
  const TestResponse response = Call(cluster.http(), "POST", kCompletions, Body("not retried", 2));
  EXPECT_EQ(response.status, 503);
  EXPECT_THAT(response.body, ::testing::HasSubstr("too many requests are being retried"));
  EXPECT_EQ(cluster.prefill[0]->counters().runs + cluster.prefill[1]->counters().runs, runs + 1);
}

TEST(FleetTest, AnotherWireVersionIsExcludedByName) {
  FakeCluster cluster(1, 1);
  cluster.decode.push_back(std::make_unique<FakeDecode>(
      cluster.fabric, FakeDecode::Options{.worker_id = "newer", .wire_min = 7, .wire_max = 8}));
  cluster.decode.push_back(std::make_unique<FakeDecode>(
      cluster.fabric, FakeDecode::Options{.worker_id = "older", .wire_min = 0, .wire_max = 0}));
  cluster.decode.push_back(std::make_unique<FakeDecode>(
      cluster.fabric, FakeDecode::Options{.worker_id = "overlaps", .wire_min = 1, .wire_max = 2}));
  auto discovery = std::make_shared<ScriptedDiscovery>();
  discovery->Add(membership::Role::kPrefill, cluster.prefill[0]->address());
  for (auto& d : cluster.decode) discovery->Add(membership::Role::kDecode, d->address());
  StartWith(cluster, discovery);
  cluster.WaitForPairs(1, 2);
  ASSERT_TRUE(spl::test::Eventually([&] { return NumDecode(cluster) == 2; }));
  for (const DecodeView& view : cluster.router->dispatcher().fleet().snapshot()->decode)
    EXPECT_TRUE(view.worker_id != "newer" && view.worker_id != "older") << view.worker_id;
}

TEST(CircuitBreakerTest, OpensProbesAndBacksOff) {
  Metrics metrics;
  CircuitBreakers breakers({.failures_to_open = 2, .open_time = 100ms, .open_time_max = 300ms}, metrics);
  auto now = SteadyClock::time_point() + 1h;
  breakers.OnFailure("a", now);
  breakers.OnSuccess("a");
  breakers.OnFailure("a", now);
  EXPECT_TRUE(breakers.Blocked(now).empty()) << "not two in a row";
  breakers.OnFailure("a", now);
  EXPECT_TRUE(breakers.Blocked(now).contains("a"));
  breakers.OnFailure("a", now);  // a request that was there before
  now += 100ms;
  EXPECT_FALSE(breakers.Blocked(now).contains("a")) << "half open";
  breakers.OnSent("a", now);
  EXPECT_TRUE(breakers.Blocked(now).contains("a")) << "one probe at a time";
  breakers.OnNeither("a");
  EXPECT_FALSE(breakers.Blocked(now).contains("a"));
  for (const auto open_time : {200ms, 300ms, 300ms}) {
    breakers.OnSent("a", now);
    breakers.OnFailure("a", now);
    EXPECT_TRUE(breakers.Blocked(now + open_time - 1ms).contains("a"));
    now += open_time;
    EXPECT_FALSE(breakers.Blocked(now).contains("a"));
  }
  breakers.OnSent("a", now);
  breakers.OnSuccess("a");
  EXPECT_TRUE(breakers.Blocked(now).empty());
  breakers.OnFailure("a", now);
  EXPECT_TRUE(breakers.Blocked(now).empty()) << "it starts from nothing";
}

TEST(RetryBudgetTest, FillsWithRequestsAndTime) {
  RetryBudget budget({.per_request = 0.5, .per_second = 10, .most = 3});
  auto now = SteadyClock::time_point() + 1h;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(budget.TakeRetry(now));
  EXPECT_FALSE(budget.TakeRetry(now));
  budget.OnRequest(now);
  EXPECT_FALSE(budget.TakeRetry(now));
  budget.OnRequest(now);
  EXPECT_TRUE(budget.TakeRetry(now));
  now += 200ms;
  EXPECT_TRUE(budget.TakeRetry(now));
  EXPECT_TRUE(budget.TakeRetry(now));
  EXPECT_FALSE(budget.TakeRetry(now));
  now += 1h;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(budget.TakeRetry(now));
  EXPECT_FALSE(budget.TakeRetry(now)) << "there is a most";
}

}  // namespace
}  // namespace spl::router
