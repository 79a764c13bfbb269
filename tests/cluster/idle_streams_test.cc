// A router that holds many streams on which nothing happens, beside others on which much does: its memory does not
// grow. SPLICE_ACTIVE_REQUESTS=100000 runs longer.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <thread>

#include "services/base/open_files.h"
#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/fake_workers.h"
#include "tests/support/http_test_client.h"
#include "tests/support/paths.h"

namespace spl::test {
namespace {

using nlohmann::json;
using spl::testing::FakeDecode;
using spl::testing::FakePrefill;
using spl::testing::HttpTestClient;

constexpr int kIdle = 1000, kActive = 200;
constexpr int kTokens = 64;  // of an answer on an active stream
constexpr int kRounds = 6;   // memory is compared between them

int NumRequests() {
  const char* text = std::getenv("SPLICE_ACTIVE_REQUESTS");
  return text == nullptr ? 6'000 : std::atoi(text);
}

std::string Body(const std::string& prompt, int max_tokens) {
  return json{{"model", "splice-tiny"}, {"prompt", prompt},   {"max_tokens", max_tokens},
              {"temperature", 0},       {"ignore_eos", true}, {"stream", true}}
      .dump();
}

TEST(IdleStreamsTest, MemoryIsFlat) {
  RaiseOpenFileLimit();
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  if (limit.rlim_cur < 2 * (kIdle + kActive)) GTEST_SKIP() << "only " << limit.rlim_cur << " files may be open here";
  spl::testing::FakeFabric fabric;
  FakePrefill prefill(fabric, {.worker_id = "p0"});
  // The idle streams are on d0, which computes two tokens and then waits; the active ones on d1.
  FakeDecode idle(fabric, {.worker_id = "d0", .max_sequences = 4096}),
      active(fabric, {.worker_id = "d1", .max_sequences = 4096});
  idle.SetGate(2);
  active.SetDraining(true);
  const auto router = Process::StartAndWaitReady(
      {BinDir() + "/splice-router", "--model", kTinyModel, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
       "--prefill", prefill.address(), "--decode", idle.address() + "," + active.address()});
  ASSERT_NE(router, nullptr);
  const std::string http = router->ready("http");
  const auto metric = [&](const char* name) { return MetricValue(HttpGet(http, "/metrics").body, name); };
  ASSERT_TRUE(
      Eventually([&] { return HttpGet(http, "/readyz").status == 200 && metric("splice_router_workers") == 3; }));
  // Until the router's next poll it may not know who drains: streams that went to d1 are active for a moment, and end.
  std::vector<std::unique_ptr<HttpTestClient>> streams;
  while (streams.size() < kIdle) {
    auto client = std::make_unique<HttpTestClient>(http);
    ASSERT_TRUE(client->connected());
    client->SendRequest("POST", "/v1/completions", Body("idle " + std::to_string(streams.size() % 50), 1000),
                        {"content-type: application/json"});
    ASSERT_EQ(client->ReadHead().status, 200);
    ASSERT_TRUE(client->NextEvent().has_value());
    streams.push_back(std::move(client));
  }
  ASSERT_EQ(idle.counters().live_tickets, kIdle);
  idle.SetDraining(true);
  active.SetDraining(false);
  ASSERT_TRUE(Eventually([&] {
    const json workers = json::parse(HttpGet(http, "/control/v1/workers").body, nullptr, false);
    for (const json& worker : workers["data"]) {
      if (worker["role"] == "decode" && worker["draining"] != (worker["worker"] == "d0")) return false;
    }
    return true;
  }));
  EXPECT_EQ(metric("splice_num_requests_running"), kIdle);

  std::vector<double> mib;
  std::atomic<int> wrong{0};
  for (int round = 0; round < kRounds; ++round) {
    std::atomic<int> left{NumRequests() / kRounds};
    std::vector<std::thread> clients;
    for (int c = 0; c < kActive; ++c) {
      clients.emplace_back([&] {
        for (int i = left.fetch_sub(1); i > 0; i = left.fetch_sub(1)) {
          HttpTestClient client(http);
          client.SendRequest("POST", "/v1/completions", Body("active " + std::to_string(i % 50), kTokens),
                             {"content-type: application/json"});
          bool done = client.ReadHead().status == 200;
          while (done) {
            const auto event = client.NextEvent();
            if (!event.has_value()) done = false;
            if (!event.has_value() || *event == "[DONE]") break;
          }
          wrong += done ? 0 : 1;
        }
      });
    }
    for (std::thread& client : clients) client.join();
    mib.push_back(static_cast<double>(router->ResidentBytes()) / (1 << 20));
    std::printf("%d streams idle, %d requests on %d streams: %.1f MiB\n", kIdle, (round + 1) * NumRequests() / kRounds,
                kActive, mib.back());
  }
  EXPECT_EQ(wrong, 0);
  // The first round warms caches up and spreads over threads' heaps.
  EXPECT_LT(mib.back(), 1.05 * mib[1] + 2);
  EXPECT_LT(mib.back(), 512);
  EXPECT_EQ(metric("splice_num_requests_running"), kIdle);

  // They were idle, not dead; and what they held is free when they leave.
  idle.SetGate(4);
  for (auto& client : streams) ASSERT_TRUE(client->NextEvent().has_value());
  streams.clear();
  EXPECT_TRUE(idle.WaitIdle());
  EXPECT_TRUE(Eventually([&] { return metric("splice_num_requests_running") == 0; }));
}

}  // namespace
}  // namespace spl::test
