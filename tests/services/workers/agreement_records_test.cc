// The record of a method: what proves a contract, how fast it forgets, and how often a verdict changes.
#include "services/prefill_work/agreement_records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/support/seeded_random.h"

namespace spl::prefill {
namespace {

chunk::Digest Namespace(uint8_t number) {
  chunk::Digest digest{};
  digest[0] = number;
  return digest;
}
const chunk::Digest kHere = Namespace(1);

TEST(AgreementRecordsTest, BoundsAreWilsons) {
  AgreementRecords records;
  EXPECT_EQ(records.Of(kHere, "m").weight, 0);
  EXPECT_EQ(records.Of(kHere, "m").low, 0);
  EXPECT_EQ(records.Of(kHere, "m").high, 1);
  for (int i = 0; i < 320; ++i) records.Observe(kHere, "m", i % 10 != 0);
  const engine::Agreement seen = records.Of(kHere, "m");
  // 1 + f + f² + ..., where f to the 500th is a half.
  const double f = std::exp2(-1.0 / 500);
  EXPECT_NEAR(seen.weight, (1 - std::pow(f, 320)) / (1 - f), 1e-6);
  EXPECT_NEAR(seen.share, 0.9, 0.002);
  EXPECT_NEAR(seen.low, engine::WilsonLow(seen.share, seen.weight), 1e-12) << "320 is the end of a block";
  EXPECT_NEAR(seen.high, engine::WilsonHigh(seen.share, seen.weight), 1e-12);
}

TEST(AgreementRecordsTest, NothingIsProvenInTheFirstBlock) {
  AgreementRecords records;
  for (int i = 0; i < AgreementRecords::kBlock - 1; ++i) {
    records.Observe(kHere, "good", true);
    records.Observe(kHere, "bad", false);
    EXPECT_EQ(records.Of(kHere, "good").low, 0);
    EXPECT_EQ(records.Of(kHere, "bad").high, 1);
  }
  records.Observe(kHere, "good", true);
  records.Observe(kHere, "bad", false);
  EXPECT_GT(records.Of(kHere, "good").low, 0.9);
  EXPECT_LT(records.Of(kHere, "bad").high, 0.1);
}

// Old comparisons count less, so that it takes some more than the 268 of Wilson's bound.
TEST(AgreementRecordsTest, ComparisonsForAContractOf99) {
  AgreementRecords records;
  int count = 0;
  while (records.Of(kHere, "m").low < 0.99) records.Observe(kHere, "m", ++count > 0);
  EXPECT_EQ(count, 352);
  EXPECT_NEAR(records.provable(), 0.9963, 1e-4);
  for (int i = 0; i < 10'000; ++i) records.Observe(kHere, "m", true);
  EXPECT_NEAR(records.Of(kHere, "m").low, records.provable(), 1e-6);
}

TEST(AgreementRecordsTest, FallsAtOnceAndRisesAtTheEndOfABlock) {
  AgreementRecords records;
  for (int i = 0; i < 480; ++i) records.Observe(kHere, "m", true);
  const double proven = records.Of(kHere, "m").low;
  EXPECT_GT(proven, 0.99);
  records.Observe(kHere, "m", false);
  const double fallen = records.Of(kHere, "m").low;
  EXPECT_LT(fallen, proven);
  EXPECT_LT(fallen, 0.99);
  for (int i = 482; i < 512; ++i) {
    records.Observe(kHere, "m", true);
    EXPECT_EQ(records.Of(kHere, "m").low, fallen);
  }
  records.Observe(kHere, "m", true);
  EXPECT_GT(records.Of(kHere, "m").low, fallen);
}

TEST(AgreementRecordsTest, ForgetsSoThatAMethodComesBack) {
  AgreementRecords records;
  const auto after = [&](bool agrees, double bound) {
    int count = 0;
    while ((records.Of(kHere, "m").low >= bound) != agrees && count < 10'000) {
      records.Observe(kHere, "m", agrees);
      ++count;
    }
    return count;
  };
  for (int i = 0; i < 5000; ++i) records.Observe(kHere, "m", true);
  EXPECT_LE(after(false, 0.99), 5) << "a record of 722 bears few failures";
  for (int i = 0; i < 5000; ++i) records.Observe(kHere, "m", false);
  EXPECT_LT(records.Of(kHere, "m").share, 0.001);
  // The share of failures is f^n: 0.9 is proven when it is 0.082, which is 1,800 later, and at the end of a block.
  EXPECT_NEAR(after(true, 0.9), 1800, 64);
}

TEST(AgreementRecordsTest, MethodsAndNamespacesAreApart) {
  AgreementRecords records;
  for (int i = 0; i < 64; ++i) {
    records.Observe(kHere, "m", false);
    records.Observe(Namespace(2), "m", true);
    records.Observe(kHere, "n", true);
  }
  EXPECT_EQ(records.Of(kHere, "m").share, 0);
  EXPECT_EQ(records.Of(Namespace(2), "m").share, 1);
  EXPECT_EQ(records.Of(kHere, "n").share, 1);
  EXPECT_EQ(records.stats().num_records, 3u);
}

TEST(AgreementRecordsTest, TheLeastRecentlyUsedMakesRoom) {
  AgreementRecords records(2);
  records.Observe(Namespace(1), "m", true);
  records.Observe(Namespace(2), "m", true);
  EXPECT_GT(records.Of(Namespace(1), "m").weight, 0);  // a look is a use
  records.Observe(Namespace(3), "m", true);
  EXPECT_EQ(records.Of(Namespace(2), "m").weight, 0);
  EXPECT_GT(records.Of(Namespace(1), "m").weight, 0);
  EXPECT_GT(records.Of(Namespace(3), "m").weight, 0);
  EXPECT_EQ(records.stats().num_records, 2u);
  EXPECT_EQ(records.stats().num_forgotten, 1u);
}

// In the long run a method below its contract is exact, one above it is used, and neither changes at every comparison.
TEST(AgreementRecordsTest, InTheLongRun) {
  std::mt19937 random = test::SeededRandom("agreement");
  struct Case {
    double quality, agreement, used_min, used_max;
  };
  for (const Case& c :
       {Case{0.9, 0.8, 0, 0.001}, Case{0.9, 0.86, 0, 0.001}, Case{0.9, 0.89, 0, 0.04}, Case{0.9, 0.97, 0.98, 1},
        Case{0.99, 0.95, 0, 0.001}, Case{0.99, 0.98, 0, 0.05}, Case{0.99, 0.9995, 0.9, 1}, Case{0.95, 0.99, 0.95, 1},
        Case{0.5, 0.4, 0, 0.001}, Case{0.5, 0.6, 0.98, 1}}) {
    SCOPED_TRACE(testing::Message() << c.agreement << " where " << c.quality << " is wanted");
    AgreementRecords records;
    constexpr int kWarmUp = 2000, kCount = 20'000;
    int used = 0, changes = 0;
    bool before = false;
    for (int i = 0; i < kWarmUp + kCount; ++i) {
      records.Observe(kHere, "m", std::bernoulli_distribution(c.agreement)(random));
      const bool may_run = records.Of(kHere, "m").low >= c.quality;
      changes += may_run != before;
      before = may_run;
      if (i >= kWarmUp) used += may_run;
    }
    EXPECT_GE(used, c.used_min * kCount);
    EXPECT_LE(used, c.used_max * kCount);
    EXPECT_LE(changes, 2 * (kWarmUp + kCount) / AgreementRecords::kBlock);
  }
}

// Where the contract is just what the method does, the verdict must not change with every comparison.
TEST(AgreementRecordsTest, DoesNotFlap) {
  std::mt19937 random = test::SeededRandom("flapping");
  AgreementRecords records;
  for (int i = 0; i < 5000; ++i) records.Observe(kHere, "m", std::bernoulli_distribution(0.92)(random));
  const double at = engine::WilsonLow(0.92, 722);  // in the middle of what the bound does
  int rises = 0, last_rise = -AgreementRecords::kBlock;
  bool before = true;
  for (int i = 0; i < 20'000; ++i) {
    records.Observe(kHere, "m", std::bernoulli_distribution(0.92)(random));
    const bool may_run = records.Of(kHere, "m").low >= at;
    if (may_run && !before) {
      EXPECT_GE(i - last_rise, AgreementRecords::kBlock);
      last_rise = i;
      ++rises;
    }
    before = may_run;
  }
  EXPECT_GT(rises, 0) << "otherwise the test shows nothing";
}

}  // namespace
}  // namespace spl::prefill
