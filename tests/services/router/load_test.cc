// Many streams at once on few threads: none lost, none mixed up.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/fake_cluster.h"
#include "tests/support/http_test_client.h"

namespace spl::router {
namespace {

using nlohmann::json;
using testing::FakeCluster;
using testing::HttpTestClient;

int ThreadsOfThisProcess() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind("Threads:", 0) == 0) return std::stoi(line.substr(8));
  }
  return -1;
}

TEST(LoadTest, ThreeHundredStreamsOnFewThreads) {
  FakeCluster cluster(2, 2);
  cluster.decode.clear();
  for (int i = 0; i < 2; ++i) {
    cluster.decode.push_back(std::make_unique<testing::FakeDecode>(
        cluster.fabric, testing::FakeDecode::Options{.worker_id = "d" + std::to_string(i), .max_sequences = 1000}));
  }
  cluster.StartRouter();
  const int threads_before = ThreadsOfThisProcess();
  for (auto& d : cluster.decode) d->SetGate(20);
  constexpr int kStreams = 300;
  std::vector<std::unique_ptr<HttpTestClient>> clients;
  for (int i = 0; i < kStreams; ++i) {
    clients.push_back(std::make_unique<HttpTestClient>(cluster.http()));
    const std::vector<int> prompt = {300 + i, 301 + i, 302 + i};
    clients.back()->SendRequest(
        "POST", "/v1/completions",
        json({{"prompt", prompt}, {"max_tokens", 10 + i % 50}, {"stream", true}, {"logprobs", 0}}).dump());
  }
  for (auto& client : clients) ASSERT_EQ(client->ReadHead().status, 200);
  // gRPC adds some threads of its own as calls come; nothing grows with the number of streams.
  EXPECT_LT(ThreadsOfThisProcess(), threads_before + 40);
  for (auto& d : cluster.decode) d->SetGate(UINT32_MAX);
  for (int i = 0; i < kStreams; ++i) {
    json tokenizer_view;
    std::vector<std::string> tokens;
    bool done = false;
    while (auto event = clients[static_cast<size_t>(i)]->NextEvent()) {
      if (*event == "[DONE]") {
        done = true;
        break;
      }
      const json logprobs = json::parse(*event).at("choices").at(0).at("logprobs");
      if (logprobs.is_null()) continue;
      for (const json& token : logprobs.at("tokens")) tokens.push_back(token);
    }
    EXPECT_TRUE(done) << i;
    ASSERT_EQ(tokens.size(), static_cast<size_t>(10 + i % 50)) << i;
    const ServedModel& model = cluster.router->dispatcher().model();
    for (size_t k = 0; k < tokens.size(); ++k) {
      const TokenId expected = 300 + i + static_cast<int>(k % 3);
      EXPECT_EQ(tokens[k], model.tokenizer().Decode(std::span(&expected, 1), {.skip_special_tokens = false}).value());
    }
  }
  for (auto& d : cluster.decode) EXPECT_TRUE(d->WaitIdle());
}

TEST(LoadTest, AThousandIdleConnectionsCostNoThreads) {
  FakeCluster cluster(1, 1);
  cluster.StartRouter();
  const int before = ThreadsOfThisProcess();
  std::vector<std::unique_ptr<HttpTestClient>> clients;
  for (int i = 0; i < 1000; ++i) {
    clients.push_back(std::make_unique<HttpTestClient>(cluster.http()));
    ASSERT_TRUE(clients.back()->connected()) << i;
  }
  EXPECT_EQ(clients.back()->Call("GET", "/healthz").status, 200);
  EXPECT_EQ(clients.front()->Call("GET", "/healthz").status, 200);
  EXPECT_LE(ThreadsOfThisProcess(), before + 2);
}

TEST(LoadTest, ClientThatDoesNotReadHoldsBackItsOwnStreamOnly) {
  FakeCluster cluster(1, 1);
  cluster.options.http.max_pending_bytes = 16 << 10;
  cluster.StartRouter();
  HttpTestClient slow(cluster.http());
  const json body = {{"prompt", "a b c"}, {"max_tokens", 16000}, {"stream", true}, {"logprobs", 20}};
  slow.SendRequest("POST", "/v1/completions", body.dump());
  ASSERT_EQ(slow.ReadHead().status, 200);
  EXPECT_EQ(testing::Call(cluster.http(), "POST", "/v1/completions", R"({"prompt":"quick","max_tokens":20})").status,
            200);
  size_t events = 0;
  std::string last;
  while (auto event = slow.NextEvent()) {
    ++events;
    last = *event;
  }
  EXPECT_EQ(last, "[DONE]");
  EXPECT_GT(events, 1000u);
}

}  // namespace
}  // namespace spl::router
