#include "services/engine/profile/head_profiler.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <numeric>
#include <random>

#include "kernels/backend/backend.h"
#include "services/engine/engine.h"
#include "services/engine/methods/recovery_methods.h"
#include "tests/support/paths.h"

namespace spl::engine {
namespace {

std::vector<int32_t> RandomText(std::mt19937& random, size_t size) {
  std::vector<int32_t> tokens(size);
  for (int32_t& token : tokens) token = 100 + static_cast<int32_t>(random() % 3000);
  return tokens;
}

class HeadProfilerTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto model = Model::Load(test::kTinyModel, kernels::MakeCpuBackend());
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
  }
  static void TearDownTestSuite() { model_.reset(); }

  static HeadProfile Measure(int32_t window, int32_t sinks, std::span<const int32_t> text,
                             std::span<const int32_t> other) {
    auto profiler =
        HeadProfiler::Create(model_, {.window = window, .sinks = sinks, .chunk_tokens = 64, .max_text_tokens = 256});
    EXPECT_TRUE(profiler.ok()) << profiler.status();
    const absl::Status added = (*profiler)->Add(text, other);
    EXPECT_TRUE(added.ok()) << added;
    return (*profiler)->Result();
  }

  static std::shared_ptr<const Model> model_;
};
std::shared_ptr<const Model> HeadProfilerTest::model_;

TEST_F(HeadProfilerTest, WhatAWindowLeavesOutIsItsEdgeMass) {
  const uint32_t seed = std::random_device()();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  const auto text = RandomText(random, 256), other = RandomText(random, 200);
  const HeadProfile all = Measure(256, 0, text, other), sinks = Measure(1, 256, text, other),
                    wide = Measure(128, 4, text, other), narrow = Measure(32, 4, text, other),
                    self = Measure(1, 0, text, other);
  const size_t heads = static_cast<size_t>(model_->config().num_layers) * model_->config().num_kv_heads;
  ASSERT_EQ(all.edge_mass.size(), heads);
  EXPECT_EQ(all.num_tokens, 256);
  for (size_t i = 0; i < heads; ++i) {
    EXPECT_NEAR(all.edge_mass[i], 0, 1e-5) << i;
    EXPECT_NEAR(sinks.edge_mass[i], 0, 1e-5) << i;
    EXPECT_GE(narrow.edge_mass[i], wide.edge_mass[i] - 1e-5) << i;
    EXPECT_GE(self.edge_mass[i], narrow.edge_mass[i] - 1e-5) << i;
    EXPECT_GT(self.edge_mass[i], 0) << i;
    EXPECT_GE(narrow.edge_mass_q99[i], narrow.edge_mass[i] - 1e-5) << "the worst 64 rows are above the mean, " << i;
    EXPECT_EQ(wide.prefix_shift[i], narrow.prefix_shift[i]) << "does not depend on the window, " << i;
    EXPECT_GT(narrow.prefix_shift[i], 0) << i;
    EXPECT_LE(narrow.prefix_shift[i], 1) << i;
  }
}

TEST_F(HeadProfilerTest, WatchingAPassChangesNothing) {
  std::mt19937 random(7);
  const auto text = RandomText(random, 200);
  const auto logits = [&](bool observed) {
    auto memory = AllocateKvMemory(*model_, PagesForTokens(model_->config(), 256));
    EXPECT_TRUE(memory.ok()) << memory.status();
    PagePool pool(memory->pages, model_->backends());
    auto executor = Executor::Create(model_, memory->pages.rank(0), {.max_rows = 256});
    EXPECT_TRUE(executor.ok()) << executor.status();
    SequenceKv kv(pool, KvShapeOf(model_->config()));
    EXPECT_TRUE(kv.Reserve(200).ok());
    std::vector<int32_t> positions(200);
    std::iota(positions.begin(), positions.end(), 0);
    auto policy = MakeRecoveryPolicy({.policy = "exact"}, model_->config());
    int32_t layers = 0;
    AttentionProfile profile({.rule = kernels::VisibilityRule::kBand, .num_sinks = 4, .window = 16},
                             [&](const AttentionObservation& seen) { EXPECT_EQ(seen.layer, layers++); });
    const ObserverList observers = {&profile};
    const PrefillSlice slice{.tokens = text,
                             .positions = positions,
                             .kv = &kv,
                             .policy = policy->get(),
                             .observers = observed ? &observers : nullptr};
    const absl::Status ran = (*executor)->Prefill({&slice, 1}, PassLayers{{0, model_->config().num_layers}});
    EXPECT_TRUE(ran.ok()) << ran;
    EXPECT_EQ(layers, observed ? model_->config().num_layers : 0);
    const int32_t last = 199;
    EXPECT_TRUE((*executor)->ComputeLogits({&last, 1}).ok());
    const auto row = (*executor)->Logits();
    return std::vector<float>(row->begin(), row->end());
  };
  EXPECT_EQ(logits(true), logits(false));
}

TEST_F(HeadProfilerTest, TextsOfTheWrongLengthAreRefused) {
  std::mt19937 random(3);
  auto profiler = HeadProfiler::Create(model_, {.chunk_tokens = 64, .max_text_tokens = 256});
  ASSERT_TRUE(profiler.ok());
  const auto good = RandomText(random, 128);
  EXPECT_EQ((*profiler)->Add(RandomText(random, 127), good).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*profiler)->Add(good, RandomText(random, 257)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*profiler)->num_texts(), 0);
}

}  // namespace
}  // namespace spl::engine
