// Which sequences of a step choose tokens: by tables that are made up, so that every decision is known beforehand.
#include "services/engine/selection/step_modes.h"

#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "services/engine/selection/adaptive.h"
#include "services/methods/methods.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;

std::vector<bool> Decide(const StepCosts& costs, const std::vector<StepCandidate>& candidates,
                         int64_t gathered_tokens = 1 << 18) {
  std::vector<bool> choose(candidates.size());
  DecideModes(costs, candidates, {.gathered_tokens = gathered_tokens}, choose);
  return choose;
}

// Milliseconds of an H100 (docs/results/2026-11-26-packed-keys.md).
StepCosts Measured() {
  const auto point = [](int64_t n, double dense, double chosen, double change) {
    return StepCosts::Point{n, dense * 1e-3, chosen * 1e-3, change * 1e-3};
  };
  return StepCosts({{8'000, {point(1, 5.56, 5.80, 1), point(8, 8.15, 7.42, 4), point(32, 16.85, 14.14, 8)}},
                    {16'000, {point(1, 5.87, 5.87, 1.5), point(8, 10.90, 7.89, 5)}},
                    {32'000, {point(1, 6.60, 6.06, 2), point(8, 16.56, 8.81, 6)}},
                    {120'000, {point(1, 10.43, 7.02, 8)}}});
}

TEST(StepCosts, MeasuredPointsAreWhatWasMeasured) {
  const StepCosts costs = Measured();
  for (const StepCosts::Row& row : costs.rows()) {
    for (const StepCosts::Point& point : row.points) {
      const auto cost = costs.At({point.sequences, point.sequences * row.length});
      ASSERT_TRUE(cost.measured);
      EXPECT_DOUBLE_EQ(cost.dense_s, point.dense_s);
      EXPECT_DOUBLE_EQ(cost.chosen_s, point.chosen_s);
      EXPECT_DOUBLE_EQ(cost.change_s, point.change_s);
    }
  }
}

// a + b n + c n L is bilinear, so that dense steps are known exactly between the points; steps that choose are taken to
// cost no less than they do.
TEST(StepCosts, BetweenThePointsDenseIsExactAndChosenIsRoundedUp) {
  const auto dense = [](double n, double length) { return 5e-3 + 1e-4 * n + 4e-8 * n * length; };
  const auto chosen = [](double n, double length) { return 5.5e-3 + 2e-4 * n + 8e-9 * n * length; };
  std::vector<StepCosts::Row> rows;
  for (const int64_t length : {4'000, 16'000, 64'000}) {
    rows.push_back({length, {}});
    for (const int64_t n : {1, 2, 4, 8, 16})
      rows.back().points.push_back({n, dense(n, length), chosen(n, length), 1e-3});
  }
  const StepCosts costs(rows);
  for (int64_t n = 1; n <= 16; ++n) {
    const int64_t up = std::bit_ceil(static_cast<uint64_t>(n));
    for (int64_t length = 4'000; length <= 64'000; length += 500) {
      const auto cost = costs.At({n, n * length});
      ASSERT_TRUE(cost.measured) << n << " x " << length;
      EXPECT_NEAR(cost.dense_s, dense(n, length), 1e-9) << n << " x " << length;
      EXPECT_NEAR(cost.chosen_s, chosen(up, length), 1e-9) << n << " x " << length;
      EXPECT_LE(cost.saved_s(), dense(n, length) - chosen(n, length) + 1e-9);
    }
  }
}

TEST(StepCosts, OutsideOfTheTableNothingIsKnown) {
  const StepCosts costs = Measured();
  EXPECT_FALSE(costs.At({0, 0}).measured);
  EXPECT_FALSE(costs.At({1, 7'999}).measured) << "shorter than any";
  EXPECT_FALSE(costs.At({33, 33 * 8'000}).measured) << "more sequences than any";
  EXPECT_FALSE(costs.At({9, 9 * 16'000}).measured) << "more than any of this length";
  EXPECT_FALSE(StepCosts().At({1, 100'000}).measured);
  // Longer than any, or so many that the next length has no room for them: what is known of the shorter ones.
  EXPECT_DOUBLE_EQ(costs.At({1, 1'000'000}).chosen_s, 7.02e-3);
  EXPECT_DOUBLE_EQ(costs.At({8, 8 * 60'000}).dense_s, 16.56e-3);
  EXPECT_DOUBLE_EQ(costs.At({32, 32 * 12'000}).dense_s, 16.85e-3);
}

TEST(StepCosts, TheBuiltInRuleIsWhatItSays) {
  const StepCosts costs = StepCosts::BuiltIn();
  EXPECT_TRUE(costs.is_built_in());
  const auto saves = [&](int64_t n, int64_t length) {
    const auto cost = costs.At({n, n * length});
    return cost.measured && cost.saved_s() > 1e-9;
  };
  for (const int64_t n : {1, 2, 64}) {
    EXPECT_FALSE(saves(n, 32'767)) << n;
    EXPECT_TRUE(saves(n, 32'768)) << n;
    EXPECT_TRUE(saves(n, 131'072)) << n;
  }
  EXPECT_TRUE(Decide(costs, {{.positions = 32'768, .steps_left = 100}})[0]);
  EXPECT_FALSE(Decide(costs, {{.positions = 32'768, .steps_left = 3}})[0]);
}

TEST(StepModes, TheTableDecides) {
  const auto one = [](int64_t positions, int64_t left = 1000) -> bool {
    return Decide(Measured(), {{.positions = positions, .steps_left = left}})[0];
  };
  EXPECT_FALSE(one(7'000));
  EXPECT_FALSE(one(8'000));
  EXPECT_FALSE(one(16'000)) << "nothing is saved";
  EXPECT_FALSE(one(19'000)) << "within the accuracy of the table";
  EXPECT_TRUE(one(32'000));
  EXPECT_TRUE(one(120'000));
  const std::vector<StepCandidate> eight(8, {.positions = 8'000, .steps_left = 1000});
  EXPECT_EQ(Decide(Measured(), eight), std::vector<bool>(8, true)) << "what one of them loses eight of them gain";
  EXPECT_EQ(Decide(StepCosts(), eight), std::vector<bool>(8, false));
  EXPECT_FALSE(Decide(Measured(), {{.positions = 32'000, .steps_left = 1000, .may_choose = false}})[0]);
}

// Packing the keys of 32,000 positions takes 2 ms more and saves 0.54 ms a step: eight steps pay it back twice.
TEST(StepModes, BeginningPaysForItselfTwice) {
  for (const int64_t left : {1, 7, 8, 256}) {
    EXPECT_EQ(Decide(Measured(), {{.positions = 32'000, .steps_left = left}})[0], left >= 8) << left;
    // One that has packed its keys goes on to its end.
    EXPECT_TRUE(Decide(Measured(), {{.positions = 32'000, .steps_left = left, .chooses = true}})[0]) << left;
  }
  // More steps than a decision is expected to hold count no more: 512 ms are never paid back by 0.54 ms.
  const StepCosts slow({{32'000, {{1, 6.60e-3, 6.06e-3, 0.08}}}});
  EXPECT_FALSE(Decide(slow, {{.positions = 32'000, .steps_left = 1'000'000}})[0]);
}

TEST(StepModes, NobodyGoesToAndFro) {
  const auto costs = [](double dense, double chosen) { return StepCosts({{100, {{1, dense, chosen, 0}}}}); };
  for (const auto& [dense, chosen, begins, goes_on] : {std::tuple{10.0, 9.0, true, true},
                                                       {10.0, 9.9, false, true},
                                                       {10.0, 10.0, false, true},
                                                       {10.0, 10.1, false, false}}) {
    EXPECT_EQ(Decide(costs(dense, chosen), {{.positions = 100, .steps_left = 99}})[0], begins) << chosen;
    EXPECT_EQ(Decide(costs(dense, chosen), {{.positions = 100, .steps_left = 99, .chooses = true}})[0], goes_on)
        << chosen;
  }
  // One that stopped rests first.
  for (const int64_t rested : {int64_t{0}, kRestSteps - 1, kRestSteps, int64_t{-1}})
    EXPECT_EQ(Decide(costs(10, 5), {{.positions = 100, .steps_left = 99, .rested = rested}})[0],
              rested < 0 || rested >= kRestSteps)
        << rested;
}

// A batch whose load goes up and down across the point where nothing is saved, at every step.
TEST(StepModes, ALoadThatSwingsChangesLittle) {
  const StepCosts costs({{10, {{1, 1.0, 0.99, 0.1}, {2, 2.0, 2.2, 0.1}, {3, 3.0, 2.0, 0.1}}}});
  StepCandidate always{.positions = 10, .steps_left = 10'000};
  int changes = 0;
  for (int step = 0; step < 1000; ++step) {
    std::vector<StepCandidate> batch(static_cast<size_t>(step % 2 == 0 ? 3 : 1), always);
    for (size_t i = 1; i < batch.size(); ++i) batch[i] = {.positions = 10, .steps_left = 10'000};
    const bool chooses = Decide(costs, batch)[0];
    changes += static_cast<int>(chooses != always.chooses);
    always.rested = chooses ? 0 : always.rested < 0 ? -1 : always.rested + 1;
    always.chooses = chooses;
  }
  EXPECT_LE(changes, 2 * 1000 / kRestSteps + 1);
}

TEST(StepModes, FewBeginAtOnceAndTheLongestFirst) {
  const std::vector<StepCandidate> batch = {{.positions = 8'000, .steps_left = 500},
                                            {.positions = 40'000, .steps_left = 500},
                                            {.positions = 30'000, .steps_left = 500},
                                            {.positions = 9'000, .steps_left = 500}};
  std::vector<StepCosts::Row> rows;
  for (const int64_t length : {8'000, 40'000}) {
    rows.push_back({length, {}});
    for (int64_t n = 1; n <= 4; ++n) rows.back().points.push_back({n, 1e-6 * n * length, 1e-7 * n * length, 1e-3});
  }
  const StepCosts costs(rows);
  EXPECT_EQ(Decide(costs, batch), (std::vector<bool>{true, true, true, true}));
  EXPECT_EQ(Decide(costs, batch, 75'000), (std::vector<bool>{false, true, true, false}));
  EXPECT_EQ(Decide(costs, batch, 1), (std::vector<bool>{false, true, false, false})) << "one always may";
}

// Whatever the table says: those that choose save time by it, all of them may, and the same batch decides the same.
TEST(StepModes, NothingIsSlowerThanDenseByTheTable) {
  std::mt19937 random = SeededRandom("modes");
  const auto seconds = [&] { return 1e-3 * (1 + random() % 100); };
  for (int round = 0; round < 500; ++round) {
    std::vector<StepCosts::Row> rows;
    for (int64_t length = 1'000; length < 200'000; length *= 2 + static_cast<int64_t>(random() % 3)) {
      rows.push_back({length, {}});
      for (int64_t n = 1; n <= 64 && random() % 8 != 0; n *= 2)
        rows.back().points.push_back({n, seconds(), seconds(), seconds()});
      if (rows.back().points.empty()) rows.pop_back();
    }
    const StepCosts costs(rows);
    std::vector<StepCandidate> batch(random() % 70);
    for (StepCandidate& candidate : batch) {
      candidate = {.positions = 500 + static_cast<int64_t>(random() % 100'000),
                   .steps_left = 1 + static_cast<int64_t>(random() % 1000),
                   .may_choose = random() % 4 != 0,
                   .chooses = random() % 2 == 0,
                   .rested = static_cast<int64_t>(random() % 200) - 1};
    }
    const std::vector<bool> choose = Decide(costs, batch);
    EXPECT_EQ(Decide(costs, batch), choose);
    StepLoad load;
    for (size_t i = 0; i < batch.size(); ++i) {
      if (!choose[i]) continue;
      EXPECT_TRUE(batch[i].may_choose);
      load = load + StepLoad{1, batch[i].positions};
    }
    if (load.sequences == 0) continue;
    EXPECT_TRUE(costs.At(load).measured);
    EXPECT_GE(costs.At(load).saved_s(), 0) << "round " << round;
  }
}

ModelConfig SmallConfig() {
  ModelConfig config;
  config.num_layers = 4;
  config.num_kv_heads = 2;
  config.num_qo_heads = 4;
  config.head_dim = 64;
  config.max_positions = 4096;
  return config;
}

DecodeOptions SmallOptions() {
  DecodeOptions options("adaptive");
  options.budget = 100;
  options.recent = 8;
  options.dims = 16;
  options.refresh_interval = 16;
  return options;
}

// Steps that do not choose ask the device for nothing, and the next choice appends what they wrote.
TEST(AdaptiveSelector, KeysOfDenseStepsAreAppendedLater) {
  const ModelConfig config = SmallConfig();
  AdaptiveSelector selector(config, nullptr, SmallOptions());
  EXPECT_FALSE(selector.may_choose(200));
  EXPECT_TRUE(selector.may_choose(201));
  EXPECT_EQ(selector.rested(300), -1);
  const auto step = [&](int64_t kv_len, bool chooses) -> std::vector<kernels::LayerSelection> {
    selector.Decide(chooses, kv_len);
    EXPECT_EQ(selector.is_exact(), !chooses);
    selector.BeginStep(kv_len);
    EXPECT_EQ(selector.Select(3, 1).rule,
              chooses ? kernels::VisibilityRule::kSelected : kernels::VisibilityRule::kFull);
    EXPECT_EQ(selector.Select(0, 1).rule, kernels::VisibilityRule::kFull) << "a dense layer";
    return {selector.layers().begin(), selector.layers().end()};
  };
  const uint64_t dense_key = selector.plan_key();
  EXPECT_TRUE(step(300, false).empty());
  const auto first = step(301, true);
  EXPECT_NE(selector.plan_key(), dense_key);
  EXPECT_TRUE(first[2].selects && first[2].first && first[2].refresh);
  const auto second = step(302, true);
  EXPECT_EQ(second[3].compact_len, 301);
  EXPECT_FALSE(second[3].first);
  EXPECT_EQ(second[2].parity, 1) << "the first choice wrote the other table";
  for (int64_t kv_len = 303; kv_len < 310; ++kv_len) EXPECT_TRUE(step(kv_len, false).empty());
  EXPECT_EQ(selector.plan_key(), dense_key);
  EXPECT_EQ(selector.rested(310), 7);
  const auto third = step(310, true);
  EXPECT_EQ(third[3].compact_len, 302);
  EXPECT_FALSE(third[3].first);
  // Behind as many steps as dimensions hold, every layer chooses its dimensions anew, of which it has some.
  for (int64_t kv_len = 311; kv_len < 330; ++kv_len) step(kv_len, false);
  const auto fourth = step(330, true);
  for (const int32_t layer : {2, 3}) {
    EXPECT_TRUE(fourth[layer].refresh) << layer;
    EXPECT_FALSE(fourth[layer].first) << layer;
    EXPECT_EQ(fourth[layer].compact_len, 310) << layer;
  }
}

TEST(AdaptiveSelector, ALargerBudgetCountsAsAShorterContext) {
  const ModelConfig config = SmallConfig();
  DecodeOptions options = SmallOptions();
  for (const int32_t budget : {100, 2048}) {
    options.budget = budget;
    EXPECT_EQ(AdaptiveSelector(config, nullptr, options).surplus(), 0);
  }
  options.budget = 3048;
  EXPECT_EQ(AdaptiveSelector(config, nullptr, options).surplus(), 2000);
  EXPECT_EQ(methods::FindSelector("adaptive")->budget, AdaptiveSelector::kCostedBudget);
}

TEST(AdaptiveSelector, GuardedHeadsSeeEverythingForAWhile) {
  const ModelConfig config = SmallConfig();
  AdaptiveSelector selector(config, nullptr, SmallOptions());
  const auto step = [&](int64_t kv_len) {
    selector.Decide(true, kv_len);
    selector.BeginStep(kv_len);
  };
  step(300);
  const uint64_t key = selector.plan_key();
  EXPECT_TRUE(selector.shares_plan());
  selector.Guard(2, 1, 302, 310);
  EXPECT_EQ(selector.Select(2, 1).rule, kernels::VisibilityRule::kSelected) << "a step that has begun";
  for (int64_t kv_len = 301; kv_len <= 312; ++kv_len) {
    step(kv_len);
    const bool guarded = kv_len >= 302 && kv_len <= 310;
    EXPECT_EQ(selector.Select(2, 1).rule, guarded ? kernels::VisibilityRule::kFull : kernels::VisibilityRule::kSelected)
        << kv_len;
    EXPECT_EQ(selector.Select(2, 0).rule, kernels::VisibilityRule::kSelected);
    EXPECT_EQ(selector.plan_key() != key, guarded) << kv_len;
    EXPECT_EQ(selector.shares_plan(), !guarded) << kv_len;
  }
  selector.Guard(2, 0, 313, 400);
  step(313);
  const uint64_t other = selector.plan_key();
  selector.Guard(2, 0, 0, 0);
  selector.Guard(3, 0, 314, 400);
  step(314);
  EXPECT_NE(selector.plan_key(), other) << "another head";
  selector.Decide(false, 315);
  selector.BeginStep(315);
  EXPECT_TRUE(selector.shares_plan()) << "a step that does not choose guards nothing";
}

}  // namespace
}  // namespace spl::engine
