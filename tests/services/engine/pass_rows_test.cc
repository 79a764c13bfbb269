// How many rows of prompts a pass has: bounds of every pass, whole pages alone, whole tiles with a step along.
#include "services/engine/runtime/pass_rows.h"

#include <gtest/gtest.h>

#include <random>

#include "kernels/common/kv_pool.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using std::chrono::milliseconds;

// Passes of 25 rows a millisecond, steps of 30 sequences, prompts 8 times as long as answers.
PassDemand Shared(int64_t waiting) {
  return {.most = 2048,
          .riders = 30,
          .time = milliseconds(50),
          .rows_per_s = 25'000,
          .rows_per_token = 8,
          .waiting = waiting,
          .shared_pass_time = milliseconds(13)};
}

TEST(PassRowsTest, NobodyWaitsForATokenSoThatThePassIsFull) {
  EXPECT_EQ(RowsOfPass({.most = 2048, .rows_per_s = 25'000}), 2048);
}

TEST(PassRowsTest, AStepThatWillBeDueShortensThePassToWholePages) {
  PassDemand demand{.most = 2048, .time = milliseconds(20), .rows_per_s = 25'000};
  EXPECT_EQ(RowsOfPass(demand), 448);
  demand.time = milliseconds(1);
  EXPECT_EQ(RowsOfPass(demand), 128) << "a pass of fewer rows is not worth its cost";
}

// 30 sequences need 240 rows each step; with their own rows these are two tiles.
TEST(PassRowsTest, AStepTakesAlongWhatKeepsTheBalance) { EXPECT_EQ(RowsOfPass(Shared(2'000)), 226); }

// A GPU computes fewer rows at a lower rate.
TEST(PassRowsTest, AStepTakesAlongAtLeastWhatTheDeviceComputesAtFullSpeed) {
  PassDemand demand = Shared(2'000);
  demand.least = kRowsOfFullSpeed;
  EXPECT_EQ(RowsOfPass(demand), 482);
}

TEST(PassRowsTest, PromptsThatQueueAreComputedWithinTheTime) {
  // 65,536 rows within 2 s, at 13 ms a pass: 426 rows each.
  EXPECT_EQ(RowsOfPass(Shared(65'536)), 482);
  // The target bounds them: 50 ms are 1,250 rows.
  EXPECT_EQ(RowsOfPass(Shared(1'000'000)), 1250);
}

TEST(PassRowsTest, WithoutMeasurementsThePassHasAsManyRowsAsTheTargetAllows) {
  PassDemand demand = Shared(2'000);
  demand.rows_per_token = 0;
  EXPECT_EQ(RowsOfPass(demand), 1250);
}

TEST(PassRowsTest, AStepThatFillsItsTilesTakesAnotherOneAlong) {
  PassDemand demand = Shared(100);
  demand.riders = 256;
  demand.rows_per_token = 0.1;
  EXPECT_EQ(RowsOfPass(demand), 128);
  demand.riders = 2047;
  EXPECT_EQ(RowsOfPass(demand), 1) << "no more than fit";
}

TEST(PassRowsTest, RandomDemandsHaveRowsThatFit) {
  std::mt19937 random = test::SeededRandom("PassRowsTest");
  const auto number = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int i = 0; i < 20'000; ++i) {
    PassDemand demand{.most = static_cast<int32_t>(64 * number(1, 128)),
                      .riders = static_cast<int32_t>(number(0, 1) * number(1, 2000)),
                      .rows_per_s = static_cast<double>(number(1, 100'000)),
                      .rows_per_token = static_cast<double>(number(0, 2000)) / 10,
                      .waiting = number(0, 10'000'000),
                      .shared_pass_time = milliseconds(number(0, 500))};
    if (number(0, 3) > 0) demand.time = milliseconds(number(0, 60'000));
    const int32_t rows = RowsOfPass(demand);
    ASSERT_GE(rows, 1);
    ASSERT_LE(rows, std::max(1, demand.most - demand.riders));
    if (rows == demand.most - demand.riders || rows == 1) continue;  // what fits
    if (demand.riders == 0) {
      ASSERT_EQ(rows % kernels::kPageTokens, 0);
    } else {
      ASSERT_EQ((rows + demand.riders) % kRowTile, 0);
    }
  }
}

}  // namespace
}  // namespace spl::engine
