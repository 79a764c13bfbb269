// splice doctor as a program: its exit codes, its JSON, and the clocks of a running cluster.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/paths.h"

namespace spl::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

Process::Result Doctor(std::vector<std::string> flags) {
  flags.insert(flags.begin(), {BinDir() + "/splice", "doctor", "--backend", "cpu", "--kv-bytes", "16MiB"});
  return Process::Run(flags);
}

json FindingOf(const json& report, const std::string& check) {
  for (const json& f : report.at("findings")) {
    if (f.at("check") == check) return f;
  }
  return nullptr;
}

TEST(DoctorTest, LooksAtARunningCluster) {
  ClusterConfig config;
  config.model_dir = kTinyModel;
  config.prefill_flags = {"--kv-bytes", "64MiB", "--threads", "1"};
  config.decode_flags = config.prefill_flags;
  const auto cluster = ProcessCluster::Start(config);
  ASSERT_NE(cluster, nullptr);
  const json workers = json::parse(HttpGet(cluster->http(), "/control/v1/workers").body);
  ASSERT_EQ(workers["data"].size(), 2U);

  const auto run = [&](const std::string& http) {
    return Doctor({"--json", "--model", kTinyModel, "--router", "http://" + cluster->http(), "--http", http, "--grpc",
                   "127.0.0.1:0"});
  };
  const Process::Result fine = run("127.0.0.1:0");
  EXPECT_EQ(fine.exit_code, 0) << fine.out << fine.err;
  const json report = json::parse(fine.out);
  EXPECT_EQ(report["ok"], true);
  EXPECT_EQ(FindingOf(report, "model")["level"], "fine");
  EXPECT_EQ(FindingOf(report, "clock router")["level"], "fine");
  for (const json& worker : workers["data"]) {  // one machine, one clock
    EXPECT_NEAR(worker["clock"]["offset_seconds"].get<double>(), 0,
                worker["clock"]["bound_seconds"].get<double>() + 0.01);
    EXPECT_EQ(FindingOf(report, "clock " + worker["worker"].get<std::string>())["level"], "fine");
  }

  const Process::Result busy = run(cluster->http());
  EXPECT_EQ(busy.exit_code, 1);
  const json finding = FindingOf(json::parse(busy.out), "port " + cluster->http());
  EXPECT_EQ(finding["level"], "wrong");
  EXPECT_THAT(finding["value"].get<std::string>(), HasSubstr("in use"));
  EXPECT_THAT(finding["change"].get<std::string>(), HasSubstr("--http"));
}

TEST(DoctorTest, SaysWhatIsWrongInATable) {
  const Process::Result run = Doctor({"--model", "no/such/folder", "--http", "", "--grpc", ""});
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_THAT(run.out, HasSubstr("WRONG   model"));
  EXPECT_THAT(run.out, HasSubstr("to change:"));
  EXPECT_THAT(run.err, HasSubstr("something must be changed"));
  EXPECT_EQ(Doctor({"--backend", "abacus"}).exit_code, 2);
}

}  // namespace
}  // namespace spl::test
