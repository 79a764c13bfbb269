#include "tools/cli/load_plan.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

namespace spl::cli {
namespace {

using nlohmann::json;

std::vector<int> PromptOf(const PlannedRequest& request) { return json::parse(request.body).at("prompt"); }

TEST(SyntheticPlanTest, LengthsPrefixAndSeed) {
  const LoadPlanOptions options{.alphabet = {1, 2, 3, 4, 5, 6, 7, 8},
                                .input_tokens = 100,
                                .shared_prefix_tokens = 40,
                                .output_tokens = 7,
                                .num_requests = 5};
  const auto plan = MakeSyntheticPlan(options);
  ASSERT_EQ(plan.size(), 5u);
  const std::vector<int> first = PromptOf(plan[0]);
  for (const PlannedRequest& request : plan) {
    const std::vector<int> prompt = PromptOf(request);
    EXPECT_EQ(prompt.size(), 100u);
    EXPECT_EQ(json::parse(request.body).at("max_tokens"), 7);
    EXPECT_TRUE(std::equal(first.begin(), first.begin() + 40, prompt.begin()));
  }
  EXPECT_NE(PromptOf(plan[0]), PromptOf(plan[1]));
  EXPECT_EQ(MakeSyntheticPlan(options)[3].body, plan[3].body);
}

// Loads that follow each other have a seed each, and find nothing of each other in a prefix cache.
TEST(SyntheticPlanTest, TheNextSeedSharesNoPrompt) {
  LoadPlanOptions options{.alphabet = {1, 2, 3, 4, 5, 6, 7, 8}, .input_tokens = 100, .num_requests = 50};
  std::set<std::vector<int>> prompts;
  for (options.seed = 1; options.seed <= 3; ++options.seed)
    for (const PlannedRequest& request : MakeSyntheticPlan(options)) prompts.insert(PromptOf(request));
  EXPECT_EQ(prompts.size(), 150u);
}

TEST(SyntheticPlanTest, PoissonArrivalsHaveTheRate) {
  const auto plan = MakeSyntheticPlan({.alphabet = {1}, .input_tokens = 1, .num_requests = 4000, .rate_per_s = 50});
  for (size_t i = 1; i < plan.size(); ++i) EXPECT_GE(plan[i].at, plan[i - 1].at);
  // 4000 exponential gaps: the mean is within 5 % with a probability beyond 99.8 %, and the seed is fixed.
  EXPECT_NEAR(std::chrono::duration<double>(plan.back().at).count(), 80, 4);
}

class TracePlanTest : public ::testing::Test {
 protected:
  std::string File(const std::string& text) {
    std::ofstream(path_) << text;
    return path_;
  }
  void TearDown() override { std::filesystem::remove(path_); }
  const std::string path_ = std::filesystem::temp_directory_path() / ("splice-trace-" + std::to_string(getpid()));
  const LoadPlanOptions options_{
      .alphabet = {1, 2, 3, 4, 5}, .input_tokens = 10, .output_tokens = 3, .num_requests = 0};
};

TEST_F(TracePlanTest, HashIdsShareTheirBlocks) {
  const auto plan =
      ReadTracePlan(File(R"({"timestamp": 0, "input_length": 1500, "output_length": 9, "hash_ids": [7, 8, 9]}
{"timestamp": 250, "input_length": 1100, "output_length": 2, "hash_ids": [7, 8, 55]}

{"prompt": "text", "timestamp": 300}
{"messages": [{"role": "user", "content": "x"}]}
)"),
                    options_, true)
          .value();
  ASSERT_EQ(plan.size(), 4u);
  const std::vector<int> a = PromptOf(plan[0]);
  const std::vector<int> b = PromptOf(plan[1]);
  EXPECT_EQ(a.size(), 1500u);
  EXPECT_EQ(b.size(), 1100u);
  EXPECT_TRUE(std::equal(a.begin(), a.begin() + 1024, b.begin()));
  EXPECT_FALSE(std::equal(a.begin() + 1024, a.begin() + 1100, b.begin() + 1024));
  EXPECT_EQ(plan[1].at, std::chrono::milliseconds(250));
  EXPECT_EQ(json::parse(plan[1].body).at("max_tokens"), 2);
  EXPECT_EQ(json::parse(plan[2].body).at("prompt"), "text");
  EXPECT_EQ(plan[3].path, "/v1/chat/completions");
}

// As tools/train/traces.py writes conversations: the last block of a turn goes on under the same id in the next one.
TEST_F(TracePlanTest, ATurnBeginsWithTheTurnBefore) {
  const auto plan = ReadTracePlan(
      File(
          R"({"timestamp": 0, "conversation": 0, "turn": 1, "input_length": 700, "output_length": 9, "hash_ids": [0, 1]}
{"timestamp": 40, "conversation": 1, "turn": 1, "input_length": 700, "output_length": 9, "hash_ids": [4096, 4097]}
{"timestamp": 90, "conversation": 0, "turn": 2, "input_length": 1300, "output_length": 9, "hash_ids": [0, 1, 2]}
)"),
      options_, true);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const std::vector<int> first = PromptOf((*plan)[0]), other = PromptOf((*plan)[1]), second = PromptOf((*plan)[2]);
  ASSERT_EQ(second.size(), 1300u);
  EXPECT_TRUE(std::equal(first.begin(), first.end(), second.begin()));
  EXPECT_FALSE(std::equal(other.begin(), other.end(), second.begin()));
}

TEST_F(TracePlanTest, BadLinesAreNamed) {
  EXPECT_NE(ReadTracePlan(File("{}\nnope\n"), options_, true).status().ToString().find(":2:"), std::string::npos);
  EXPECT_FALSE(ReadTracePlan(File("\n"), options_, true).ok());
  EXPECT_FALSE(ReadTracePlan("/does/not/exist", options_, true).ok());
}

}  // namespace
}  // namespace spl::cli
