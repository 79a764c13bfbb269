#include "services/engine/runtime/prefill_meter.h"

#include <gtest/gtest.h>

namespace spl::engine {
namespace {

ModelConfig Config() {
  ModelConfig config;
  config.num_layers = 2;
  config.hidden_size = 256;
  config.num_qo_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  config.intermediate_size = 512;
  return config;
}

class PrefillMeterTest : public ::testing::Test {
 protected:
  // A pass of the first tokens of prompts.
  void Run(int32_t tokens, double seconds) { meter_.Add(tokens, tokens * meter_.cost().PerToken(), seconds); }

  PrefillMeter meter_{Config()};
};

// A GPU takes 6 ms for 8 tokens and 50 ms for 2,048. Prompts that hit the cache say nothing of those that do not.
TEST_F(PrefillMeterTest, ShortPassesDoNotMakeAWorkerLookSlow) {
  Run(2048, 0.05);
  for (int i = 0; i < 1000; ++i) Run(8, 0.006);
  EXPECT_NEAR(meter_.load(0).tokens_per_s, 2048 / 0.05, 1);
  EXPECT_NEAR(meter_.load(0).first_tokens_per_s, 2048 / 0.05, 1);
  EXPECT_NEAR(meter_.RecomputeSeconds(0, 2048), 0.05 * meter_.cost().Of(0, 2048) / (2048 * meter_.cost().PerToken()),
              1e-6);
}

TEST_F(PrefillMeterTest, FollowsTheSpeedOfLongPasses) {
  Run(512, 0.05);
  Run(2048, 0.4);
  EXPECT_GT(meter_.load(0).tokens_per_s, 2048 / 0.3) << "one pass may be slow by chance";
  for (int i = 0; i < 30; ++i) Run(2048, 0.4);
  EXPECT_NEAR(meter_.load(0).tokens_per_s, 2048 / 0.4, 20);
}

// A worker that has only seen short prompts is as fast as with the longest of them.
TEST_F(PrefillMeterTest, TheLongestPassesCount) {
  EXPECT_EQ(meter_.load(0).tokens_per_s, 0);
  Run(8, 0.01);
  EXPECT_NEAR(meter_.load(0).tokens_per_s, 800, 1);
  for (int i = 0; i < 60; ++i) {
    Run(200, 0.02);
    Run(8, 0.01);
  }
  EXPECT_NEAR(meter_.load(0).tokens_per_s, 10'000, 1);
  Run(0, 0.01);  // every row was found
  EXPECT_NEAR(meter_.load(0).tokens_per_s, 10'000, 1);
}

}  // namespace
}  // namespace spl::engine
