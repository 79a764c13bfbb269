// Workers that refuse, fail or die: what the client sees, and what is left behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <nlohmann/json.hpp>

#include "services/base/fault_point.h"
#include "tests/support/eventually.h"
#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"

namespace spl::router {
namespace {

using nlohmann::json;
using testing::Call;
using testing::FakeCluster;
using testing::FakeDecode;
using testing::FakePrefill;
using testing::HttpTestClient;
using testing::TestResponse;

constexpr char kCompletions[] = "/v1/completions";

std::string Body(const std::string& prompt, int max_tokens, bool stream = false) {
  return json({{"prompt", prompt}, {"max_tokens", max_tokens}, {"stream", stream}}).dump();
}

std::string TextOf(const TestResponse& response) {
  EXPECT_EQ(response.status, 200) << response.body;
  return json::parse(response.body).at("choices").at(0).at("text");
}

TEST(FaultTest, FailedPrefillIsRetriedOnAnotherWorker) {
  FakeCluster cluster(2, 1);
  cluster.StartRouter();
  const std::string expected = TextOf(Call(cluster.http(), "POST", kCompletions, Body("retry me please", 8)));
  for (auto& p : cluster.prefill) p->FailRuns(grpc::Status(grpc::StatusCode::UNAVAILABLE, "device lost"), 1);
  const TestResponse response = Call(cluster.http(), "POST", kCompletions, Body("retry me please", 8));
  EXPECT_EQ(TextOf(response), expected);
  EXPECT_EQ(json::parse(response.body).at("splice").at("attempts"), 3);
  EXPECT_EQ(json::parse(response.body).at("splice").at("types"),
            json::parse(R"({"weights":"fp8-e4m3-block","kv":"bf16"})"));
  EXPECT_TRUE(cluster.decode[0]->WaitIdle());
}

// A prompt that waits for a minute behind others must find its pages there when its turn comes.
TEST(FaultTest, ATicketLivesLongerBehindALongQueue) {
  for (const uint64_t queued : {0, 600'000}) {
    FakeCluster cluster(0, 1);
    cluster.prefill.push_back(
        std::make_unique<FakePrefill>(cluster.fabric, FakePrefill::Options{.queued_tokens = queued}));
    cluster.StartRouter();
    EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, Body("x", 2)).status, 200);
    const uint32_t ttl_ms = cluster.decode[0]->last_reserve().ttl_ms();
    EXPECT_GE(ttl_ms, queued == 0 ? 60'000u : 300'000u) << "60 s, and four times the queue's 60";
    EXPECT_LT(ttl_ms, queued == 0 ? 70'000u : 400'000u);
  }
}

TEST(FaultTest, FailedAttemptReleasesItsTicketQuietly) {
  FakeCluster cluster(2, 1);
  cluster.StartRouter();
  for (auto& p : cluster.prefill) p->FailRuns(grpc::Status(grpc::StatusCode::DATA_LOSS, "checksum"), 1);
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, Body("x", 2)).status, 200);
  EXPECT_TRUE(cluster.decode[0]->WaitIdle());
  EXPECT_TRUE(cluster.decode[0]->counters().last_writer_quiet);
}

// A prefill worker that refuses a prompt gives the ticket up first, so that the stream may end before its answer comes.
TEST(FaultTest, ARefusalIsThePrefillWorkersAlsoIfTheStreamEndsFirst) {
  FakeCluster cluster(2, 1);
  cluster.StartRouter();
  for (auto& p : cluster.prefill) p->Hold(true);
  TestResponse response;
  std::thread client([&] { response = Call(cluster.http(), "POST", kCompletions, Body("refuse me", 8)); });
  size_t first = 0;
  EXPECT_TRUE(test::Eventually([&] {
    first = cluster.prefill[0]->counters().waiting == 1 ? 0 : 1;
    return cluster.prefill[first]->counters().waiting == 1 && cluster.decode[0]->counters().streams == 1;
  }));
  FakePrefill& refusing = *cluster.prefill[first];
  cluster.decode[0]->BreakStreams(grpc::Status(grpc::StatusCode::CANCELLED, "released: too long"));
  refusing.FailRuns(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "too long"), 1);
  for (auto& p : cluster.prefill) p->Hold(false);
  client.join();
  EXPECT_EQ(response.status, 200) << response.body;
  const json receipt = json::parse(response.body).at("splice");
  EXPECT_EQ(receipt.at("attempts"), 2);
  EXPECT_EQ(receipt.at("workers").at("prefill"), first == 0 ? "p1" : "p0");
}

TEST(FaultTest, AttemptsAreBounded) {
  FakeCluster cluster(1, 1);
  cluster.StartRouter();
  cluster.prefill[0]->FailRuns(grpc::Status(grpc::StatusCode::INTERNAL, "bug"), 1000);
  const TestResponse response = Call(cluster.http(), "POST", kCompletions, Body("x", 2));
  EXPECT_EQ(response.status, 503);
  EXPECT_EQ(cluster.prefill[0]->counters().runs, 3);
  EXPECT_TRUE(cluster.decode[0]->WaitIdle());
}

TEST(FaultTest, TheRequestsOwnFaultIsNotRetried) {
  FakeCluster cluster(2, 1);
  cluster.StartRouter();
  for (auto& p : cluster.prefill) p->FailRuns(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "bad"), 1);
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, Body("x", 2)).status, 400);
  EXPECT_EQ(cluster.prefill[0]->counters().runs + cluster.prefill[1]->counters().runs, 1);
}

TEST(FaultTest, FullDecodeWorkerIsPassedOver) {
  FakeCluster cluster(1, 2);
  cluster.StartRouter();
  cluster.decode[0]->SetFull(true);
  for (int i = 0; i < 4; ++i) {
    const TestResponse response = Call(cluster.http(), "POST", kCompletions, Body("x", 2));
    ASSERT_EQ(response.status, 200);
    EXPECT_EQ(json::parse(response.body).at("splice").at("workers").at("decode"), "d1");
  }
}

TEST(FaultTest, FullClusterAndNoQueueIs429WithRetryAfter) {
  FakeCluster cluster(1, 2);
  cluster.options.dispatch.admission.max_queue = 0;
  cluster.StartRouter();
  for (auto& d : cluster.decode) d->SetFull(true);
  const TestResponse response = Call(cluster.http(), "POST", kCompletions, Body("x", 2));
  EXPECT_EQ(response.status, 429);
  EXPECT_GE(std::stoi(response.headers.at("retry-after")), 1);
  EXPECT_EQ(json::parse(response.body).at("error").at("type"), "rate_limit_error");
}

TEST(FaultTest, RequestsWaitForRoomInTheBoundedQueue) {
  FakeCluster cluster(1, 1);
  cluster.options.dispatch.admission.max_queue = 1;
  cluster.StartRouter();
  cluster.decode[0]->SetFull(true);
  HttpTestClient waiting(cluster.http());
  waiting.SendRequest("POST", kCompletions, Body("x", 2));
  while (cluster.router->dispatcher().admission().num_waiting() == 0) std::this_thread::yield();
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, Body("y", 2)).status, 429);
  cluster.decode[0]->SetFull(false);
  EXPECT_EQ(waiting.Read().status, 200);
}

// With decode workers that replay what the client has, and with older ones, for which it is part of the prompt.
class MigrationTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Replays, MigrationTest, ::testing::Bool());

TEST_P(MigrationTest, LostDecodeWorkerMidStreamIsInvisible) {
  FakeCluster cluster(2, 2, "", GetParam());
  cluster.StartRouter();
  const std::string expected =
      TextOf(Call(cluster.http(), "POST", kCompletions, Body("one unbroken stream of text", 40)));
  for (auto& d : cluster.decode) d->SetGate(15);
  HttpTestClient client(cluster.http());
  client.SendRequest("POST", kCompletions, Body("one unbroken stream of text", 40, true));
  ASSERT_EQ(client.ReadHead().status, 200);
  std::string text;
  json last;
  const auto take = [&](const std::string& event) {
    if (event == "[DONE]") return;
    last = json::parse(event);
    text += last.at("choices").at(0).at("text").get<std::string>();
  };
  take(client.NextEvent().value());
  FakeDecode& victim = *cluster.decode[cluster.decode[0]->counters().live_tickets == 1 ? 0 : 1];
  victim.BreakStreams(grpc::Status(grpc::StatusCode::UNAVAILABLE, "device lost"));
  for (auto& d : cluster.decode) d->SetGate(UINT32_MAX);
  while (auto event = client.NextEvent()) take(*event);
  EXPECT_EQ(text, expected);
  EXPECT_EQ(last.at("splice").at("migrations"), 1);
  EXPECT_EQ(last.at("splice").at("exact"), false) << "the output so far was computed again, as a prompt";
  EXPECT_EQ(last.at("choices").at(0).at("finish_reason"), "length");
  FakeDecode& heir = *cluster.decode[&victim == cluster.decode[0].get() ? 1 : 0];
  const v1::ReserveRequest reserved = heir.last_reserve();
  const auto runs = {cluster.prefill[0]->last_run(), cluster.prefill[1]->last_run()};
  const auto again = std::find_if(runs.begin(), runs.end(), [&](const v1::PrefillRequest& run) {
    // The other prefill worker's last request may be the first of this test, for the same decode worker.
    return run.request_id() == reserved.request_id() && run.ticket().worker_id() == heir.options().worker_id;
  });
  ASSERT_NE(again, runs.end());
  EXPECT_EQ(again->sampling().max_tokens(), 40u);
  EXPECT_EQ(again->num_output_tokens(), reserved.num_output_tokens());
  EXPECT_EQ(again->token_ids_size(), reserved.prompt_tokens());
  if (GetParam()) {
    EXPECT_EQ(reserved.num_output_tokens(), 0u);
    EXPECT_GE(reserved.replay_token_ids_size(), 1);
    EXPECT_TRUE(reserved.token_ids().empty());
  } else {
    EXPECT_GT(reserved.num_output_tokens(), 0u);
    EXPECT_TRUE(reserved.replay_token_ids().empty());
    EXPECT_EQ(reserved.token_ids_size(), again->token_ids_size());
  }
}

TEST(FaultTest, KilledDecodeWorkerMidStreamIsInvisible) {
  FakeCluster cluster(1, 2);
  cluster.StartRouter();
  for (auto& d : cluster.decode) d->SetGate(10);
  HttpTestClient client(cluster.http());
  client.SendRequest("POST", kCompletions, Body("kill nine", 30, true));
  ASSERT_EQ(client.ReadHead().status, 200);
  const size_t victim = cluster.decode[0]->counters().live_tickets == 1 ? 0 : 1;
  cluster.decode[1 - victim]->SetGate(UINT32_MAX);
  cluster.decode[victim]->Kill();
  std::string last;
  while (auto event = client.NextEvent()) last = *event;
  EXPECT_EQ(last, "[DONE]");
}

TEST(FaultTest, MigrationsAreBounded) {
  FakeCluster cluster(1, 2);
  cluster.StartRouter();
  for (auto& d : cluster.decode) d->SetGate(10);
  HttpTestClient client(cluster.http());
  client.SendRequest("POST", kCompletions, Body("twice unlucky", 30, true));
  ASSERT_EQ(client.ReadHead().status, 200);
  // Every worker that the sequence comes to loses it. (A loss before the first token of an attempt is a retry, so there
  // may be more losses than migrations.)
  std::atomic<bool> ended{false};
  std::thread breaker([&] {
    const auto commits = [&] { return cluster.decode[0]->counters().commits + cluster.decode[1]->counters().commits; };
    for (int seen = 0; !ended; std::this_thread::yield()) {
      if (commits() == seen) continue;
      seen = commits();
      for (auto& d : cluster.decode) d->BreakStreams(grpc::Status(grpc::StatusCode::UNAVAILABLE, "lost"));
    }
  });
  std::string last;
  while (auto event = client.NextEvent()) last = *event;
  ended = true;
  breaker.join();
  EXPECT_EQ(json::parse(last).at("error").at("type"), "service_unavailable_error");
}

TEST(FaultTest, SeveralContinuationsCannotMigrate) {
  FakeCluster cluster(1, 2);
  cluster.StartRouter();
  for (auto& d : cluster.decode) d->SetGate(10);
  HttpTestClient client(cluster.http());
  client.SendRequest("POST", kCompletions,
                     json({{"prompt", "a b c"}, {"max_tokens", 30}, {"n", 2}, {"stream", true}}).dump());
  ASSERT_EQ(client.ReadHead().status, 200);
  for (auto& d : cluster.decode) d->BreakStreams(grpc::Status(grpc::StatusCode::UNAVAILABLE, "lost"));
  std::string last;
  while (auto event = client.NextEvent()) last = *event;
  EXPECT_THAT(json::parse(last).at("error").at("message").get<std::string>(), ::testing::HasSubstr("n > 1"));
}

TEST(FaultTest, DecodeWorkerLostBeforeTheFirstTokenIsARetry) {
  FakeCluster cluster(1, 2);
  cluster.StartRouter();
  cluster.prefill[0]->Hold(true);
  HttpTestClient client(cluster.http());
  client.SendRequest("POST", kCompletions, Body("early loss", 6));
  ASSERT_TRUE(cluster.prefill[0]->WaitFor([](const FakePrefill::Counters& c) { return c.waiting == 1; }));
  const size_t victim = cluster.decode[0]->counters().live_tickets == 1 ? 0 : 1;
  cluster.decode[victim]->Kill();
  ASSERT_TRUE(cluster.prefill[0]->WaitFor([](const FakePrefill::Counters& c) { return c.runs == 2; }));
  cluster.prefill[0]->Hold(false);
  const TestResponse response = client.Read();
  ASSERT_EQ(response.status, 200) << response.body;
  EXPECT_EQ(json::parse(response.body).at("splice").at("workers").at("decode"), "d" + std::to_string(1 - victim));
}

TEST(FaultTest, NoWorkersIs503AndNotReady) {
  FakeCluster cluster(1, 1);
  cluster.options.dispatch.worker_wait = std::chrono::milliseconds(100);
  cluster.StartRouter();
  cluster.decode[0]->Kill();
  while (cluster.router->ready()) std::this_thread::yield();
  EXPECT_EQ(Call(cluster.http(), "GET", "/readyz").status, 503);
  EXPECT_EQ(Call(cluster.http(), "GET", "/healthz").status, 200);
  const TestResponse refused = Call(cluster.http(), "POST", kCompletions, Body("x", 2));
  EXPECT_EQ(refused.status, 503);
  EXPECT_THAT(refused.body, ::testing::HasSubstr("no decode worker can take the request (1 prefill and 0 decode"));
}

// Every prefill worker is gone; a request that comes meanwhile is served when one of them is back.
TEST(FaultTest, ARequestWaitsForAWorkerThatRestarts) {
  const ScopedFaults faults;
  FakeCluster cluster(2, 1);
  cluster.options.dispatch.worker_wait = testing::kLongWait;
  cluster.StartRouter();
  const std::string expected = TextOf(Call(cluster.http(), "POST", kCompletions, Body("patience", 4)));
  const std::string address = cluster.prefill[0]->address();
  for (auto& p : cluster.prefill) p->Kill();
  while (cluster.router->ready()) std::this_thread::yield();
  ASSERT_TRUE(ArmFault("router.place", {}).ok());
  HttpTestClient client(cluster.http());
  client.SendRequest("POST", kCompletions, Body("patience", 4));
  // More looks for a worker than a request has attempts.
  ASSERT_TRUE(WaitForFaultHits("router.place", 6, static_cast<int>(testing::kLongWait.count())));
  cluster.prefill[0] = std::make_unique<FakePrefill>(
      cluster.fabric, FakePrefill::Options{.worker_id = "p0", .epoch = 2, .listen = address});
  const TestResponse response = client.Read();
  EXPECT_EQ(TextOf(response), expected);
  EXPECT_EQ(json::parse(response.body).at("splice").at("attempts"), 1) << "looking for a worker is no attempt";
}

// A deadline inside the cluster, a ticket's for example, is a failure of the cluster: the client's time is not over.
TEST(FaultTest, ADeadlineOfAWorkerIsNotTheClients) {
  FakeCluster cluster(1, 1);
  cluster.StartRouter();
  cluster.prefill[0]->FailRuns(grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "the ticket's lease ran out"), 3);
  const TestResponse response = Call(cluster.http(), "POST", kCompletions, Body("late", 4));
  EXPECT_EQ(response.status, 503) << response.body;
  EXPECT_THAT(response.body, ::testing::HasSubstr("service_unavailable_error"));
  EXPECT_THAT(response.body, ::testing::HasSubstr("after 3 attempts"));
}

TEST(FaultTest, RestartedWorkerIsConnectedAgain) {
  FakeCluster cluster(1, 1);
  cluster.StartRouter();
  const std::string address = cluster.decode[0]->address();
  cluster.decode[0]->Kill();
  while (cluster.router->ready()) std::this_thread::yield();
  cluster.decode[0] = std::make_unique<FakeDecode>(
      cluster.fabric, FakeDecode::Options{.worker_id = "d0", .epoch = 2, .listen = address});
  cluster.WaitForPairs(1, 1);
  EXPECT_GE(cluster.prefill[0]->counters().connects, 2);
  EXPECT_EQ(Call(cluster.http(), "POST", kCompletions, Body("x", 2)).status, 200);
}

TEST(FaultTest, WorkerOfAnotherModelIsExcluded) {
  FakeCluster cluster(1, 1);
  cluster.decode.push_back(std::make_unique<FakeDecode>(
      cluster.fabric, FakeDecode::Options{.worker_id = "other", .fingerprint = std::string(32, 'x')}));
  for (const auto& p : cluster.prefill) cluster.options.dispatch.fleet.prefill.push_back(p->address());
  for (const auto& d : cluster.decode) cluster.options.dispatch.fleet.decode.push_back(d->address());
  auto router = RouterServer::Start(cluster.options);
  ASSERT_TRUE(router.ok());
  // Which of the two models is taken depends on who answers first; never both.
  const auto deadline = std::chrono::steady_clock::now() + testing::kLongWait;
  while ((*router)->dispatcher().fleet().snapshot()->decode.empty() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_EQ((*router)->dispatcher().fleet().snapshot()->decode.size(), 1u);
  (*router)->Stop();
}

TEST(FaultTest, DrainingDecodeWorkerGetsNothingNew) {
  FakeCluster cluster(1, 2);
  cluster.StartRouter();
  cluster.decode[0]->SetDraining(true);
  const auto draining_seen = [&] {
    const auto fleet = cluster.router->dispatcher().fleet().snapshot();
    return std::any_of(fleet->decode.begin(), fleet->decode.end(), [](const DecodeView& d) { return d.draining; });
  };
  while (!draining_seen()) std::this_thread::yield();
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(json::parse(Call(cluster.http(), "POST", kCompletions, Body("x", 1)).body)
                  .at("splice")
                  .at("workers")
                  .at("decode"),
              "d1");
  }
}

}  // namespace
}  // namespace spl::router
