// A client that leaves, or a deadline that passes, frees everything on both workers at once.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"

namespace spl::router {
namespace {

using nlohmann::json;
using testing::FakeCluster;
using testing::FakeDecode;
using testing::FakePrefill;
using testing::HttpTestClient;
using testing::TestResponse;
using Clock = std::chrono::steady_clock;

// The bound of the issue. Sanitizers slow everything down by an order of magnitude.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::chrono::milliseconds kFreedWithin{1'000};
#else
constexpr std::chrono::milliseconds kFreedWithin{100};
#endif

class CancelTest : public ::testing::Test {
 protected:
  CancelTest() : cluster_(1, 1) { cluster_.StartRouter(); }

  static std::string Body(bool stream) {
    return json({{"prompt", "tell me a long story"}, {"max_tokens", 500}, {"stream", stream}}).dump();
  }
  void ExpectAllFree(Clock::time_point since) {
    EXPECT_TRUE(cluster_.decode[0]->WaitIdle());
    EXPECT_LT(Clock::now() - since, kFreedWithin);
    EXPECT_TRUE(cluster_.prefill[0]->WaitFor([](const FakePrefill::Counters& c) { return c.waiting == 0; }));
    while (cluster_.router->dispatcher().num_active() > 0) std::this_thread::yield();
    EXPECT_EQ(cluster_.router->dispatcher().admission().num_running(), 0u);
  }

  FakeCluster cluster_;
};

TEST_F(CancelTest, ClientThatLeavesMidStreamFreesTheSequence) {
  cluster_.decode[0]->SetGate(20);
  HttpTestClient client(cluster_.http());
  client.SendRequest("POST", "/v1/completions", Body(true));
  ASSERT_EQ(client.ReadHead().status, 200);
  ASSERT_TRUE(client.NextEvent().has_value());
  const Clock::time_point left = Clock::now();
  client.Close();
  ExpectAllFree(left);
}

TEST_F(CancelTest, ClientThatIsKilledMidStreamFreesTheSequence) {
  cluster_.decode[0]->SetGate(20);
  HttpTestClient client(cluster_.http());
  client.SendRequest("POST", "/v1/completions", Body(true));
  ASSERT_EQ(client.ReadHead().status, 200);
  const Clock::time_point left = Clock::now();
  client.Abort();
  ExpectAllFree(left);
}

TEST_F(CancelTest, ClientThatLeavesDuringPrefillFreesBothSides) {
  cluster_.prefill[0]->Hold(true);
  HttpTestClient client(cluster_.http());
  client.SendRequest("POST", "/v1/completions", Body(false));
  ASSERT_TRUE(cluster_.prefill[0]->WaitFor([](const FakePrefill::Counters& c) { return c.waiting == 1; }));
  ASSERT_EQ(cluster_.decode[0]->counters().live_tickets, 1);
  const Clock::time_point left = Clock::now();
  client.Close();
  ASSERT_TRUE(cluster_.prefill[0]->WaitFor([](const FakePrefill::Counters& c) { return c.cancels == 1; }));
  ExpectAllFree(left);
  // The prefill worker may still be writing, or not have the call yet: the decode worker is told that it is quiet when
  // it has said so.
  ASSERT_TRUE(
      cluster_.decode[0]->WaitFor([](const FakeDecode::Counters& c) { return c.releases + c.late_releases == 2; }));
  EXPECT_EQ(cluster_.decode[0]->counters().quiet_releases, 1);
  EXPECT_TRUE(cluster_.decode[0]->counters().last_writer_quiet);
  EXPECT_EQ(cluster_.prefill[0]->counters().revokes, 1);
  const v1::RevokeTicketRequest revoke = cluster_.prefill[0]->last_revoke();
  EXPECT_EQ(revoke.ticket_id(), cluster_.prefill[0]->last_run().ticket().ticket_id());
  EXPECT_EQ(revoke.epoch(), 1u);
  EXPECT_GE(revoke.ttl_ms(), 60'000u);
}

TEST_F(CancelTest, WithoutTheWritersWordNobodyIsToldThatItIsQuiet) {
  cluster_.prefill[0]->FailRevokes(grpc::Status(grpc::StatusCode::UNAVAILABLE, "its writes were not flushed"));
  cluster_.prefill[0]->Hold(true);
  {
    HttpTestClient client(cluster_.http());
    client.SendRequest("POST", "/v1/completions", Body(false));
    ASSERT_TRUE(cluster_.prefill[0]->WaitFor([](const FakePrefill::Counters& c) { return c.waiting == 1; }));
  }
  ASSERT_TRUE(cluster_.prefill[0]->WaitFor([](const FakePrefill::Counters& c) { return c.revokes == 1; }));
  ASSERT_TRUE(
      cluster_.decode[0]->WaitFor([](const FakeDecode::Counters& c) { return c.releases + c.late_releases == 1; }));
  // A whole request later there is still no such word.
  cluster_.prefill[0]->Hold(false);
  EXPECT_EQ(
      testing::Call(cluster_.http(), "POST", "/v1/completions", json({{"prompt", "short"}, {"max_tokens", 4}}).dump())
          .status,
      200);
  EXPECT_EQ(cluster_.decode[0]->counters().quiet_releases, 0);
}

// Prefill's answer comes before its last write has arrived: before the first chunk nothing is known.
TEST_F(CancelTest, ClientThatLeavesBehindTheFirstTokenHasTheWriterAsked) {
  cluster_.decode[0]->SetGate(0);
  HttpTestClient client(cluster_.http());
  client.SendRequest("POST", "/v1/completions", Body(true));
  ASSERT_EQ(client.ReadHead().status, 200);
  ASSERT_TRUE(client.NextEvent().has_value());
  client.Abort();
  ASSERT_TRUE(cluster_.prefill[0]->WaitFor([](const FakePrefill::Counters& c) { return c.revokes == 1; }));
  ASSERT_TRUE(cluster_.decode[0]->WaitFor([](const FakeDecode::Counters& c) { return c.quiet_releases == 1; }));
  // The two calls may overtake each other.
  EXPECT_TRUE(
      cluster_.decode[0]->WaitFor([](const FakeDecode::Counters& c) { return c.releases + c.late_releases == 2; }));
}

TEST_F(CancelTest, WhatIsBeingDecodedNeedsNoWordOfItsWriter) {
  cluster_.decode[0]->SetGate(20);
  HttpTestClient client(cluster_.http());
  client.SendRequest("POST", "/v1/completions", Body(true));
  ASSERT_EQ(client.ReadHead().status, 200);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(client.NextEvent().has_value());
  client.Abort();
  ASSERT_TRUE(cluster_.decode[0]->WaitFor([](const FakeDecode::Counters& c) { return c.quiet_releases == 1; }));
  EXPECT_EQ(cluster_.prefill[0]->counters().revokes, 0);
}

TEST_F(CancelTest, DeadlineBeforeTheFirstTokenIs504) {
  cluster_.prefill[0]->Hold(true);
  const TestResponse response =
      testing::Call(cluster_.http(), "POST", "/v1/completions", Body(true), {"x-request-timeout-ms: 50"});
  EXPECT_EQ(response.status, 504);
  EXPECT_EQ(json::parse(response.body).at("error").at("type"), "timeout_error");
  ExpectAllFree(Clock::now());
}

TEST_F(CancelTest, DeadlineMidStreamEndsTheStreamWithAnError) {
  cluster_.decode[0]->SetGate(5);
  HttpTestClient client(cluster_.http());
  client.SendRequest("POST", "/v1/completions", Body(true), {"x-request-timeout-ms: 200"});
  ASSERT_EQ(client.ReadHead().status, 200);
  std::string last;
  while (auto event = client.NextEvent()) last = *event;
  EXPECT_EQ(json::parse(last).at("error").at("type"), "timeout_error");
  ExpectAllFree(Clock::now());
}

TEST_F(CancelTest, ServerDefaultDeadlineBoundsTheClients) {
  FakeCluster cluster(1, 1);
  cluster.options.dispatch.request_timeout = std::chrono::milliseconds(50);
  cluster.StartRouter();
  cluster.prefill[0]->Hold(true);
  EXPECT_EQ(
      testing::Call(cluster.http(), "POST", "/v1/completions", Body(false), {"x-request-timeout-ms: 60000"}).status,
      504);
}

TEST_F(CancelTest, HalfOfSixtyFourStreamsCancelledMidwayLeaveNothingBehind) {
  cluster_.decode[0]->SetGate(10);
  std::vector<std::unique_ptr<HttpTestClient>> clients;
  for (int i = 0; i < 64; ++i) {
    clients.push_back(std::make_unique<HttpTestClient>(cluster_.http()));
    clients.back()->SendRequest(
        "POST", "/v1/completions",
        json({{"prompt", "p" + std::to_string(i)}, {"max_tokens", 40}, {"stream", true}}).dump());
  }
  for (auto& client : clients) ASSERT_EQ(client->ReadHead().status, 200);
  for (size_t i = 0; i < clients.size(); i += 2) clients[i]->Close();
  ASSERT_TRUE(cluster_.decode[0]->WaitFor([](const FakeDecode::Counters& c) { return c.live_tickets == 32; }));
  cluster_.decode[0]->SetGate(UINT32_MAX);
  for (size_t i = 1; i < clients.size(); i += 2) {
    std::string last;
    while (auto event = clients[i]->NextEvent()) last = *event;
    EXPECT_EQ(last, "[DONE]") << i;
  }
  ExpectAllFree(Clock::now());
}

TEST_F(CancelTest, DrainFinishesRunningStreamsAndRefusesNewOnes) {
  cluster_.decode[0]->SetGate(5);
  HttpTestClient client(cluster_.http());
  client.SendRequest("POST", "/v1/completions", Body(true));
  ASSERT_EQ(client.ReadHead().status, 200);
  std::thread stopper([&] { cluster_.router->Stop(); });
  // The listener is closed before the drain waits.
  while (HttpTestClient(cluster_.http()).connected()) std::this_thread::yield();
  cluster_.decode[0]->SetGate(UINT32_MAX);
  std::string last;
  while (auto event = client.NextEvent()) last = *event;
  EXPECT_EQ(last, "[DONE]");
  stopper.join();
  EXPECT_TRUE(cluster_.decode[0]->WaitIdle());
}

}  // namespace
}  // namespace spl::router
