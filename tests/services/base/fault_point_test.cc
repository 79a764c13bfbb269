#include "services/base/fault_point.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

namespace spl {
namespace {

FaultPoint test_point("base.test");

TEST(FaultPoint, PassesWhenDisarmed) {
  EXPECT_FALSE(test_point.armed());
  const FaultOutcome outcome = test_point.Hit();
  EXPECT_TRUE(outcome.status.ok());
  EXPECT_FALSE(outcome.drop);
  EXPECT_FALSE(outcome.corrupt);
}

TEST(FaultPoint, GivesTheArmedOutcomeAndCounts) {
  ScopedFaults scope;
  ASSERT_TRUE(ArmFaultFromFlag("base.test=error(DATA_LOSS)").ok());
  EXPECT_EQ(test_point.Hit().status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(test_point.Hit().status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(FaultHits("base.test"), 2u);
  ASSERT_TRUE(ArmFaultFromFlag("base.test=drop").ok());
  EXPECT_TRUE(test_point.Hit().drop);
  ASSERT_TRUE(ArmFaultFromFlag("base.test=corrupt").ok());
  EXPECT_TRUE(test_point.Hit().corrupt);
  DisarmFault("base.test");
  EXPECT_FALSE(test_point.Hit().corrupt);
}

// A program that serves users has no such variable in its environment.
TEST(FaultPoint, TheFlagWantsAVariable) {
  ScopedFaults scope;
  for (const char* const value : {"", "0", "yes"}) {
    setenv(kEnableFaultsVariable, value, 1);
    const absl::Status refused = ArmFaultFromFlag("base.test=drop");
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
    EXPECT_FALSE(test_point.armed());
  }
  unsetenv(kEnableFaultsVariable);
  EXPECT_EQ(ArmFaultFromFlag("base.test=drop").code(), absl::StatusCode::kFailedPrecondition);
  setenv(kEnableFaultsVariable, "1", 1);
  EXPECT_TRUE(ArmFaultFromFlag("base.test=drop").ok());
  EXPECT_TRUE(test_point.Hit().drop);
}

TEST(FaultPoint, ActsOnTheNamedHitOnly) {
  ScopedFaults scope;
  ASSERT_TRUE(ArmFaultFromFlag("base.test=drop@3").ok());
  EXPECT_FALSE(test_point.Hit().drop);
  EXPECT_FALSE(test_point.Hit().drop);
  EXPECT_TRUE(test_point.Hit().drop);
  EXPECT_FALSE(test_point.Hit().drop);
}

TEST(FaultPoint, DelaysUntilItsEvent) {
  ScopedFaults scope;
  ASSERT_TRUE(ArmFaultFromFlag("base.test=delay_until(go)").ok());
  std::atomic<bool> passed{false};
  std::thread delayed([&] {
    EXPECT_TRUE(test_point.Hit().status.ok());
    passed.store(true);
  });
  ASSERT_TRUE(WaitForFaultHits("base.test", 1, 10'000));
  EXPECT_FALSE(passed.load());
  FireFaultEvent("go");
  delayed.join();
  EXPECT_TRUE(passed.load());
}

TEST(FaultPoint, DelaysForATimeAndLetsOthersPassMeanwhile) {
  ScopedFaults scope;
  ASSERT_TRUE(ArmFaultFromFlag("base.test=delay(200)@1").ok());
  const auto start = std::chrono::steady_clock::now();
  std::thread delayed([&] { EXPECT_TRUE(test_point.Hit().status.ok()); });
  ASSERT_TRUE(WaitForFaultHits("base.test", 1, 10'000));
  EXPECT_TRUE(test_point.Hit().status.ok());
  EXPECT_EQ(FaultHits("base.test"), 2u) << "the table is not locked";
  delayed.join();
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(200));
}

TEST(FaultPoint, DisarmingLetsDelayedThreadsGo) {
  std::thread delayed;
  {
    ScopedFaults scope;
    ASSERT_TRUE(ArmFaultFromFlag("base.test=delay_until(never)").ok());
    delayed = std::thread([] { EXPECT_TRUE(test_point.Hit().status.ok()); });
    ASSERT_TRUE(WaitForFaultHits("base.test", 1, 10'000));
  }
  delayed.join();
}

TEST(FaultPoint, EndsTheProcess) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto hit_armed = [](const char* flag) {
    if (ArmFaultFromFlag(flag).ok()) test_point.Hit();
  };
  EXPECT_EXIT(hit_armed("base.test=crash"), ::testing::KilledBySignal(SIGABRT), "");
  EXPECT_EXIT(hit_armed("base.test=kill"), ::testing::KilledBySignal(SIGKILL), "");
}

TEST(FaultPoint, RefusesUnknownNamesAndActions) {
  EXPECT_EQ(ArmFaultFromFlag("no.such.point=drop").code(), absl::StatusCode::kNotFound);
  for (const char* text : {"base.test", "base.test=", "base.test=explode", "base.test=error(NOPE)", "base.test=error",
                           "base.test=drop@0", "base.test=drop@x", "base.test=delay_until()", "base.test=delay",
                           "base.test=delay()", "base.test=delay(x)", "base.test=delay(60001)"}) {
    EXPECT_EQ(ArmFaultFromFlag(text).code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_FALSE(test_point.armed());
}

}  // namespace
}  // namespace spl
