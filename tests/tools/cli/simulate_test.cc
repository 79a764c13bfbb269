// Placement over modelled workers: what must hold for any change of its cost.
#include "tools/cli/simulate.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>

#include "tests/support/temp_dir.h"

namespace spl::cli {
namespace {

std::map<std::string, SimReport> Compare(const std::string& kind, double rate, uint32_t decode_workers) {
  const auto trace = MakeSimTrace(kind, {.num_requests = 6'000, .rate_per_s = rate, .seed = 3}).value();
  std::map<std::string, SimReport> reports;
  for (const auto policy : {router::PlacementPolicy::kRoundRobin, router::PlacementPolicy::kLeastLoaded,
                            router::PlacementPolicy::kPrefixOnly, router::PlacementPolicy::kSplice}) {
    SimOptions options{.prefill_workers = 8, .decode_workers = decode_workers};
    options.placement.policy = policy;
    options.placement.seed = 1;
    const SimReport report = Simulate(trace, options).value();
    reports[report.policy] = report;
  }
  return reports;
}

void ExpectSpliceBest(const std::map<std::string, SimReport>& reports) {
  const SimReport& splice = reports.at("splice");
  EXPECT_EQ(splice.refused, 0u);
  for (const auto& [name, report] : reports) {
    if (name == "splice") continue;
    EXPECT_LT(splice.ttft_ms.p95, report.ttft_ms.p95) << name;
  }
}

TEST(SimulateTest, SpliceBeatsTheOthersOnARagTrace) { ExpectSpliceBest(Compare("rag", 110, 12)); }
TEST(SimulateTest, SpliceBeatsTheOthersOnAChatTrace) { ExpectSpliceBest(Compare("chat", 120, 24)); }

// One text in front of every prompt, at four fifths of the prefill pool's load: its holder must not do all the work.
TEST(SimulateTest, AHotPromptSpreads) {
  const SimReport splice = Compare("hot", 650, 32).at("splice");
  EXPECT_GT(splice.utilization, 0.7);
  EXPECT_LT(splice.utilization, 0.9);
  EXPECT_LT(splice.max_over_mean, 1.3);
}

TEST(SimulateTest, TheSameSeedGivesTheSameNumbers) {
  const auto trace = MakeSimTrace("rag", {.num_requests = 500, .rate_per_s = 60}).value();
  SimOptions options{.prefill_workers = 3, .decode_workers = 2};
  options.placement.seed = 9;
  auto first = SimJson({Simulate(trace, options).value()}), second = SimJson({Simulate(trace, options).value()});
  first[0].erase("decision_us_p99");
  second[0].erase("decision_us_p99");
  EXPECT_EQ(first, second);
}

TEST(SimulateTest, TracesComeBackFromTheirFile) {
  const spl::testing::TempDir dir;
  for (const char* kind : {"rag", "chat", "hot"}) {
    const auto made = MakeSimTrace(kind, {.num_requests = 50}).value();
    std::ofstream(dir.path() + "/trace") << TraceText(made);
    const auto read = ReadSimTrace(dir.path() + "/trace", 0, 0).value();
    ASSERT_EQ(read.size(), made.size());
    for (size_t i = 0; i < made.size(); ++i) {
      EXPECT_EQ(read[i].hash_ids, made[i].hash_ids);
      EXPECT_EQ(read[i].input_tokens, made[i].input_tokens);
      EXPECT_EQ(read[i].segments.size(), made[i].segments.size());
    }
    const auto faster = ReadSimTrace(dir.path() + "/trace", 100, 0).value();
    EXPECT_NEAR(faster.back().at_s, 0.5, 1e-9);
  }
  std::ofstream(dir.path() + "/bad") << "{\"input_length\": 100, \"segments\": [[0, 50, 1], [40, 60, 2]]}\n";
  EXPECT_EQ(ReadSimTrace(dir.path() + "/bad", 0, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(MakeSimTrace("other", {}).ok());
}

// The planner's pools follow the load; a worker is taken away only when it is empty (Simulate aborts otherwise).
TEST(SimulateTest, ThePlannersPoolsFollowTheLoad) {
  auto trace = MakeSimTrace("chat", {.num_requests = 12'000, .rate_per_s = 20}).value();
  for (SimRequest& request : trace) {
    if (request.at_s > 300) request.at_s = 300 + (request.at_s - 300) * 4;  // the load falls to a quarter
  }
  SimOptions options{.prefill_workers = 2, .decode_workers = 2, .scaling = SimScaling()};
  options.placement.seed = 1;
  options.model.prompt_token_s *= 8;
  options.model.decode_kv_tokens = 200'000;
  options.scaling->planner.prefill.max_replicas = options.scaling->planner.decode.max_replicas = 16;
  const SimReport report = Simulate(trace, options).value();
  uint32_t most = 0;
  for (const SimScalePoint& point : report.scale) most = std::max(most, point.prefill + point.decode);
  ASSERT_FALSE(report.scale.empty());
  EXPECT_GT(most, 5u);
  EXPECT_LT(report.scale.back().prefill + report.scale.back().decode, most);
  EXPECT_EQ(report.refused, 0u);
}

}  // namespace
}  // namespace spl::cli
