// A store that reads slowly, as real programs: prompts are not held back for it, and their answers are the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <nlohmann/json.hpp>

#include "services/base/fault_point.h"
#include "tests/cluster/processes.h"
#include "tests/support/eventually.h"
#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace spl::test {
namespace {

using nlohmann::json;

constexpr int kTokens = 1000;  // 15 chunks
constexpr int kPrompts = 3;

std::vector<int> Prompt(int number) {
  std::vector<int> prompt;
  for (int i = 0; i < kTokens; ++i) prompt.push_back(100 + (i * (number + 3) + number * 977) % 3000);
  return prompt;
}

json Ask(const std::string& http, int number) {
  const json body = {{"prompt", Prompt(number)}, {"max_tokens", 12}, {"temperature", 0}, {"ignore_eos", true}};
  const HttpReply reply = HttpPost(http, "/v1/completions", body.dump());
  EXPECT_EQ(reply.status, 200) << reply.body;
  return json::parse(reply.body, nullptr, false);
}

double MetricOf(const Process& process, const std::string& name) {
  return MetricValue(HttpGet(process.ready("metrics"), "/metrics").body, name);
}

TEST(FetchOrComputeClusterTest, AStoreThatReadsSlowlyHoldsNobodyBack) {
  ::setenv(kEnableFaultsVariable, "1", 1);
  const testing::TempDir data;
  std::vector<json> expected;
  {
    auto cluster = ProcessCluster::Start({.model_dir = kTinyModel, .data_dir = data.path()});
    ASSERT_NE(cluster, nullptr);
    for (int i = 0; i < kPrompts; ++i) expected.push_back(Ask(cluster->http(), i)["choices"][0]["text"]);
    ASSERT_TRUE(Eventually(
        [&] { return MetricOf(*cluster->store, "splice_store_chunks_stored_total") >= kPrompts * (kTokens / 64); }));
    cluster->store->Signal(SIGTERM);  // what it holds goes to its disk
    ASSERT_EQ(cluster->store->WaitForExit(), 0);
  }
  // Every chunk takes a second: all of a prompt's 15, where computing takes a second or two on a slow machine.
  auto cluster = ProcessCluster::Start({.model_dir = kTinyModel,
                                        .data_dir = data.path(),
                                        .store_flags = {"--kv-transport", "none", "--fault", "kvstore.get=delay(1000)"},
                                        .prefill_flags = {"--fetch", "cost"}});
  ASSERT_NE(cluster, nullptr);
  for (int i = 0; i < kPrompts; ++i) {
    const json reply = Ask(cluster->http(), i);
    EXPECT_EQ(reply["choices"][0]["text"], expected[static_cast<size_t>(i)]);
    const json& receipt = reply["splice"];
    // It is waited for two seconds where all is fetched (--fetch always), and for a few hundredths here.
    EXPECT_LT(receipt["seconds"]["fetch"], 0.5) << receipt;
    EXPECT_EQ(receipt["store"]["skipped_tokens"].get<int>() + receipt["tokens"]["stored"].get<int>(), kTokens / 64 * 64)
        << receipt;
    if (i == 0) {
      EXPECT_THAT(receipt["store"]["use"], ::testing::AnyOf("late", "shared")) << receipt;
      // The link is measured behind the prompt.
      ASSERT_TRUE(Eventually([&] { return MetricOf(*cluster->prefill[0], "splice_store_link_bytes_per_second") > 0; }));
    } else {
      EXPECT_EQ(receipt["store"]["use"], "slower") << receipt;
      EXPECT_EQ(receipt["bytes"]["fetched"], 0) << receipt;
    }
  }
  EXPECT_GE(MetricOf(*cluster->prefill[0], "splice_store_skipped_tokens_total"), 2 * (kTokens / 64 * 64));
}

}  // namespace
}  // namespace spl::test
