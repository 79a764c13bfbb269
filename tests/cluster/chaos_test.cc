// 4 prefill workers, 4 decode workers, 2 stores, 2 routers and etcd, killed, stopped and delayed under load, half of
// the seeds with TLS between them. As a soak:
//   build/tests/chaos_test --minutes 30 --requests 10000 --seed 7 --report chaos.json
#include "tests/cluster/chaos.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <random>

#include "services/base/fault_point.h"

namespace spl::test {
namespace {

ChaosOptions g_options;
std::string g_report;
bool g_judge_detection = false;

TEST(ChaosTest, NoTokenIsWrongAndNothingHangsOrLeaks) {
  std::printf("seed %llu, %s TLS\n", static_cast<unsigned long long>(g_options.seed),
              g_options.tls ? "with" : "without");
  const ChaosReport report = RunChaos(g_options);
  const std::string text = report.ToJson().dump(2);
  std::printf("%s\n", text.c_str());
  if (!g_report.empty()) std::ofstream(g_report) << text << "\n";
  EXPECT_GT(report.exact, 0u);
  EXPECT_EQ(report.wrong, 0u);
  EXPECT_EQ(report.hangs, 0u);
  EXPECT_EQ(report.untyped, 0u);
  EXPECT_EQ(report.crashes, 0u);
  EXPECT_EQ(report.leaked_pages, 0);
  EXPECT_EQ(report.unfinished, 0);
  EXPECT_GT(report.requests_after, 0u);
  EXPECT_EQ(report.exact_after, report.requests_after) << "a cluster that is well again serves everything";
  // Needs a machine that the processes have for themselves, and more losses than a short run has.
  if (g_judge_detection) {
    EXPECT_LT(report.SilenceQuantile(0.99), 1.0);
  }
}

}  // namespace
}  // namespace spl::test

int main(int argc, char** argv) {
  setenv(spl::kEnableFaultsVariable, "1", 1);  // of the programs that it starts
  testing::InitGoogleTest(&argc, argv);
  CLI::App app("chaos_test: kills and stops the programs of a cluster under load and checks every answer");
  double minutes = 0.35;
  int64_t between_faults_ms = spl::test::g_options.between_faults.count();
  spl::test::g_options.seed = std::random_device()();
  app.add_option("--minutes", minutes, "of load and faults")->capture_default_str();
  app.add_option("--requests", spl::test::g_options.min_requests,
                 "goes on until there are so many, 3 x minutes at most");
  app.add_option("--seed", spl::test::g_options.seed, "of every choice; default: random, printed");
  app.add_option("--clients", spl::test::g_options.num_clients, "at once")->capture_default_str();
  app.add_flag("--only-routers", spl::test::g_options.only_routers, "kill routers and nothing else");
  app.add_option("--between-faults-ms", between_faults_ms, "on average")->capture_default_str();
  std::optional<bool> tls;
  app.add_option("--tls", tls, "between the programs; default: with odd seeds");
  app.add_option("--report", spl::test::g_report, "file for the figures as JSON");
  app.add_flag("--judge-detection", spl::test::g_judge_detection, "fail when lost workers are found late (p99 of 1 s)");
  CLI11_PARSE(app, argc, argv);
  spl::test::g_options.duration = std::chrono::seconds(static_cast<int64_t>(minutes * 60));
  spl::test::g_options.tls = tls.value_or(spl::test::g_options.seed % 2 == 1);
  spl::test::g_options.between_faults = std::chrono::milliseconds(between_faults_ms);
  return RUN_ALL_TESTS();
}
