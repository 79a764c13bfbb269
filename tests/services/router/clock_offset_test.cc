#include "services/router/fleet/clock_offset.h"

#include <gtest/gtest.h>

#include <cmath>

namespace spl::router {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kOurs = 1'800'000'000'000'000'000;

TEST(ClockEstimateTest, TheTruthIsWithinTheBound) {
  // The other clock is 250 ms ahead. It is read at once, in the middle, or at the end of a call of 40 ms.
  for (const int64_t read_ms : {0, 20, 40}) {
    ClockEstimate estimate;
    const ClockEstimate::Time asked{}, answered = asked + 40ms;
    estimate.Observe(kOurs + (250 - (40 - read_ms)) * 1'000'000, kOurs, asked, answered);
    ASSERT_TRUE(estimate.best().has_value());
    EXPECT_NEAR(estimate.best()->bound_s, 0.02, 1e-6);
    EXPECT_LE(std::abs(estimate.best()->seconds - 0.25), estimate.best()->bound_s + 1e-6);
  }
}

TEST(ClockEstimateTest, TheQuickestAnswerOfAMinuteCounts) {
  ClockEstimate estimate;
  const ClockEstimate::Time start{};
  estimate.Observe(kOurs, kOurs, start, start + 10ms);
  estimate.Observe(kOurs + 1'000'000'000, kOurs, start + 1s, start + 1s + 400ms);
  EXPECT_NEAR(estimate.best()->bound_s, 0.005, 1e-9);
  estimate.Observe(kOurs, kOurs, start + 2s, start + 2s + 2ms);
  EXPECT_NEAR(estimate.best()->bound_s, 0.001, 1e-9);
  // What is old says nothing about now.
  estimate.Observe(kOurs + 1'000'000'000, kOurs, start + 70s, start + 70s + 400ms);
  EXPECT_NEAR(estimate.best()->bound_s, 0.2, 1e-9);
  EXPECT_NEAR(estimate.best()->seconds, 1.2, 1e-6);
}

}  // namespace
}  // namespace spl::router
