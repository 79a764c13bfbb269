// The time to the first token by stage, through real workers in one process: stages add up to it, and what slows one
// stage down shows up there and nowhere else.
#include "services/router/telemetry/ttft_stages.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>

#include "services/base/fault_point.h"
#include "tests/cluster/processes.h"
#include "tests/support/paths.h"
#include "tools/cli/local_cluster.h"

namespace spl::test {
namespace {

using nlohmann::json;
using router::TtftStage;
using router::TtftStages;
using namespace std::chrono_literals;

TEST(TtftStagesTest, CursorLeavesNoGap) {
  const TtftStages::Clock::time_point start{};
  TtftStages stages(start);
  stages.End(TtftStage::kQueue, start + 10ms);
  stages.EndCall(TtftStage::kReserve, 0.003, start + 15ms);
  stages.EndPrefillCall({.run_s = 0.080, .queue_s = 0.01, .lookup_s = 0.02, .fetch_s = 0.005, .prefill_s = 0.04},
                        start + 100ms);
  EXPECT_NEAR(stages.seconds(TtftStage::kReserve), 0.003, 1e-9);
  EXPECT_NEAR(stages.seconds(TtftStage::kPrefillWorker), 0.005, 1e-9);
  EXPECT_NEAR(stages.seconds(TtftStage::kNetwork), 0.002 + 0.005, 1e-9);
  EXPECT_NEAR(stages.sum(), 0.1, 1e-9);
}

// A worker whose clock runs too fast, or that does not say how long it took.
TEST(TtftStagesTest, WorkersCannotClaimMoreThanThereWas) {
  const TtftStages::Clock::time_point start{};
  TtftStages stages(start);
  stages.EndCall(TtftStage::kReserve, 7, start + 1ms);
  stages.EndPrefillCall({.queue_s = -1, .prefill_s = 9}, start + 3ms);
  EXPECT_NEAR(stages.seconds(TtftStage::kPrefill), 0.002, 1e-9);
  EXPECT_EQ(stages.seconds(TtftStage::kNetwork), 0);
  stages.EndPrefillCall({.prefill_s = 0.001}, start + 5ms);
  EXPECT_NEAR(stages.seconds(TtftStage::kNetwork), 0.001, 1e-9);
  EXPECT_NEAR(stages.sum(), 0.005, 1e-9);
  stages.End(TtftStage::kDeliver, start);  // a clock that stands still gives nothing, and takes nothing
  EXPECT_NEAR(stages.sum(), 0.005, 1e-9);
}

struct Answer {
  double ttft = 0, client = 0;  // seconds, as the router says; until the client had its first event
  std::map<std::string, double> stages;
};

Answer AskAt(const std::string& http, const std::string& id, int sentences, std::mt19937& random) {
  std::string prompt = id;
  for (int i = 0; i < sentences; ++i) prompt += " The ship of day " + std::to_string(random() % 9000) + " is lost.";
  const json body = {{"model", "splice-tiny"},
                     {"prompt", prompt},
                     {"max_tokens", 2},
                     {"temperature", 0},
                     {"ignore_eos", true},
                     {"stream", true},
                     {"stream_options", {{"include_usage", true}}}};
  const auto start = std::chrono::steady_clock::now();
  SseStream stream(http, "/v1/completions", body.dump());
  Answer answer;
  json last;
  for (std::string data = stream.Next(); !data.empty() && data != "[DONE]"; data = stream.Next()) {
    if (answer.client == 0)
      answer.client = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    last = json::parse(data);
    if (last.contains("splice")) {
      answer.ttft = last["splice"]["seconds"]["ttft"];
      answer.stages = last["splice"]["ttft_stages"].get<std::map<std::string, double>>();
    }
  }
  return answer;
}

double Sum(const std::map<std::string, double>& stages) {
  double sum = 0;
  for (const auto& [name, seconds] : stages) sum += seconds;
  return sum;
}

class TtftStagesClusterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    cli::LocalClusterOptions options;
    options.model.dir = kTinyModel;
    options.http_listen = options.grpc_listen = "127.0.0.1:0";
    options.kv_bytes = 128 << 20;
    options.num_threads = 1;
    auto cluster = cli::LocalCluster::Start(options);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    (void)Ask("warm");
  }
  void TearDown() override { cluster_->Stop(); }

  // About `sentences` times 15 tokens that no other prompt begins with, for a request of two tokens.
  Answer Ask(const std::string& id, int sentences = 20) {
    return AskAt(cluster_->http_address(), id, sentences, random_);
  }

  std::mt19937 random_{11};
  std::unique_ptr<cli::LocalCluster> cluster_;
};

TEST_F(TtftStagesClusterTest, AddUpToTheTimeToTheFirstToken) {
  double ttft = 0, network = 0, worst = 0;
  for (int i = 0; i < 40; ++i) {
    const Answer answer = Ask("r" + std::to_string(i), 5 + i);
    ASSERT_GT(answer.ttft, 0);
    EXPECT_NEAR(Sum(answer.stages), answer.ttft, 0.02 * answer.ttft) << json(answer.stages);
    EXPECT_LE(answer.ttft, answer.client);  // which also has the way to the router and back
    worst = std::max(worst, std::abs(Sum(answer.stages) - answer.ttft) / answer.ttft);
    ttft += answer.ttft;
    network += answer.stages.contains("network") ? answer.stages.at("network") : 0;
  }
  std::printf("40 requests: ttft %.1f ms in the mean, worst gap %.3f%%, network %.1f%%\n", ttft / 40 * 1e3, worst * 100,
              network / ttft * 100);
  EXPECT_LT(network, 0.25 * ttft);

  const std::string metrics = HttpGet(cluster_->http_address(), "/metrics").body;
  EXPECT_EQ(MetricValue(metrics, "splice_router_ttft_stage_seconds_count"),
            static_cast<double>(router::kNumTtftStages) * 41);
  const double observed = MetricValue(metrics, "splice_time_to_first_token_seconds_sum");
  EXPECT_NEAR(MetricValue(metrics, "splice_router_ttft_stage_seconds_sum"), observed, 0.02 * observed);
  const json debug = json::parse(HttpGet(cluster_->http_address(), "/debug/requests").body);
  const json& seconds = debug["recent"][0]["seconds"];
  EXPECT_NEAR(Sum(seconds["ttft_stages"].get<std::map<std::string, double>>()), seconds["ttft"].get<double>(),
              0.02 * seconds["ttft"].get<double>());
}

TEST_F(TtftStagesClusterTest, ADelayShowsUpInItsStage) {
  struct Case {
    const char* fault;
    const char* stage;
  };
  constexpr Case kCases[] = {
      {"router.tokenize", "tokenize"},   {"router.place", "dispatch"},       {"router.deliver", "deliver"},
      {"decode.reserve", "reserve"},     {"prefill.run", "prefill_worker"},  {"engine.prefill.admit", "lookup"},
      {"engine.prefill.fetch", "fetch"}, {"engine.prefill.step", "prefill"},
  };
  const ScopedFaults guard;
  for (const Case& c : kCases) {
    const auto action = ParseFaultAction("delay(300)@1");
    ASSERT_TRUE(action.ok()) << action.status();
    ASSERT_TRUE(ArmFault(c.fault, *action).ok()) << c.fault;
    const Answer answer = Ask(c.fault, 6);  // one chunk: on a slow machine, too, no stage is near the delay by itself
    DisarmAllFaults();
    SCOPED_TRACE(std::string(c.fault) + ": " + json(answer.stages).dump());
    EXPECT_NEAR(Sum(answer.stages), answer.ttft, 0.02 * answer.ttft);
    EXPECT_GE(answer.ttft, 0.3);
    for (const auto& [name, seconds] : answer.stages) {
      if (name == c.stage)
        EXPECT_GE(seconds, 0.295);
      else
        EXPECT_LT(seconds, 0.2) << name;
    }
  }
}

// The first call fails: what the attempt took, and the pause behind it, is a stage of its own.
TEST_F(TtftStagesClusterTest, FailedAttemptsAreRetry) {
  const ScopedFaults guard;
  const auto action = ParseFaultAction("error(INTERNAL)@1");
  ASSERT_TRUE(action.ok());
  ASSERT_TRUE(ArmFault("prefill.run", *action).ok());
  const Answer answer = Ask("again");
  EXPECT_NEAR(Sum(answer.stages), answer.ttft, 0.02 * answer.ttft) << json(answer.stages);
  // No other worker is there: the router waits before it tries again (DispatchOptions::retry_backoff).
  ASSERT_TRUE(answer.stages.contains("retry")) << json(answer.stages);
  EXPECT_GE(answer.stages.at("retry"), 0.09);
}

// The four programs as processes, one request at a time: who comes second waits for its turn.
TEST(TtftStagesProcessTest, AddUpAcrossProcessesAndShowTheQueue) {
  ClusterConfig config;
  config.model_dir = kTinyModel;
  config.prefill_flags = {"--kv-bytes", "128MiB", "--threads", "1"};
  config.decode_flags = config.prefill_flags;
  config.router_flags = {"--max-running", "1"};
  const auto cluster = ProcessCluster::Start(config);
  ASSERT_NE(cluster, nullptr);
  std::mt19937 random(5);
  (void)AskAt(cluster->http(), "warm", 5, random);
  double ttft = 0, network = 0;
  for (int i = 0; i < 10; ++i) {
    const Answer answer = AskAt(cluster->http(), "p" + std::to_string(i), 10, random);
    EXPECT_NEAR(Sum(answer.stages), answer.ttft, 0.02 * answer.ttft) << json(answer.stages);
    EXPECT_LE(answer.ttft, answer.client);
    ttft += answer.ttft;
    network += answer.stages.contains("network") ? answer.stages.at("network") : 0;
  }
  std::printf("10 requests: ttft %.1f ms in the mean, network %.1f%%\n", ttft / 10 * 1e3, network / ttft * 100);
  EXPECT_LT(network, 0.3 * ttft);

  const json running = {{"model", "splice-tiny"}, {"prompt", "on and on"}, {"max_tokens", 300},
                        {"temperature", 0},       {"ignore_eos", true},    {"stream", true}};
  SseStream first(cluster->http(), "/v1/completions", running.dump());
  ASSERT_NE(first.Next(), "");
  std::thread reader([&] {
    while (!first.Next().empty()) {
    }
  });
  const Answer second = AskAt(cluster->http(), "second", 5, random);
  reader.join();
  EXPECT_NEAR(Sum(second.stages), second.ttft, 0.02 * second.ttft) << json(second.stages);
  ASSERT_TRUE(second.stages.contains("queue"));
  EXPECT_GT(second.stages.at("queue"), 0.5 * second.ttft) << json(second.stages);
}

}  // namespace
}  // namespace spl::test
