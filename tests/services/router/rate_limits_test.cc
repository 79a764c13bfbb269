#include "services/router/admission/rate_limits.h"

#include <gtest/gtest.h>

#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

using std::chrono::seconds;

class RateLimitsTest : public ::testing::Test {
 protected:
  static std::string Header(const RateLimits::Headers& headers, const std::string& name) {
    for (const auto& [key, value] : headers) {
      if (key == name) return value;
    }
    return "";
  }
  const std::shared_ptr<RateLimits> limits_ = std::make_shared<RateLimits>();
  RateLimits::Clock::time_point now_ = RateLimits::Clock::now();
};

TEST_F(RateLimitsTest, CallersWithoutLimitsAreNotCounted) {
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(limits_->Admit({.name = "a"}, now_).ok());
  EXPECT_TRUE(limits_->HeadersFor({.name = "a"}, now_).empty());
}

TEST_F(RateLimitsTest, RequestsPerMinuteFillUpEvenly) {
  const Caller a{.name = "a", .limits = {.requests_per_minute = 6}};
  for (int i = 0; i < 6; ++i) EXPECT_TRUE(limits_->Admit(a, now_).ok()) << i;
  const auto refused = limits_->Admit(a, now_);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ErrorCodeOf(refused.status()), "rate_limit_exceeded");
  EXPECT_NE(MessageOf(refused.status()).find("6 requests per minute"), std::string::npos);
  EXPECT_EQ(RetryAfterMsOf(refused.status()), 10'000u);
  EXPECT_FALSE(limits_->Admit(a, now_ + seconds(9)).ok());
  EXPECT_TRUE(limits_->Admit(a, now_ + seconds(11)).ok());
  EXPECT_TRUE(limits_->Admit({.name = "b", .limits = a.limits}, now_).ok()) << "another key";
}

TEST_F(RateLimitsTest, TokensMayGoIntoDebtAndThenWait) {
  const Caller a{.name = "a", .limits = {.tokens_per_minute = 6'000}};
  auto lease = limits_->Admit(a, now_);
  ASSERT_TRUE(lease.ok());
  lease->Take(5'000);
  lease->Take(4'000);  // 3,000 below nothing: half a minute
  const auto refused = limits_->Admit(a, now_);
  EXPECT_NE(MessageOf(refused.status()).find("6000 tokens per minute"), std::string::npos);
  EXPECT_EQ(RetryAfterMsOf(refused.status()), 31'000u);
  EXPECT_FALSE(limits_->Admit(a, now_ + seconds(29)).ok());
  EXPECT_TRUE(limits_->Admit(a, now_ + seconds(31)).ok());
}

TEST_F(RateLimitsTest, ConcurrencyCountsLeases) {
  const Caller a{.name = "a", .limits = {.max_concurrent = 2}};
  auto first = limits_->Admit(a, now_);
  {
    auto second = limits_->Admit(a, now_);
    ASSERT_TRUE(second.ok());
    RateLimits::Lease moved = *std::move(second);
    EXPECT_FALSE(limits_->Admit(a, now_).ok());
  }
  EXPECT_TRUE(limits_->Admit(a, now_).ok());
}

TEST_F(RateLimitsTest, HeadersAreOpenAis) {
  const Caller a{.name = "a", .limits = {.requests_per_minute = 60, .tokens_per_minute = 1'000}};
  auto lease = limits_->Admit(a, now_);
  lease->Take(900);
  const auto headers = limits_->HeadersFor(a, now_);
  EXPECT_EQ(Header(headers, "x-ratelimit-limit-requests"), "60");
  EXPECT_EQ(Header(headers, "x-ratelimit-remaining-requests"), "59");
  EXPECT_EQ(Header(headers, "x-ratelimit-reset-requests"), "1s");
  EXPECT_EQ(Header(headers, "x-ratelimit-limit-tokens"), "1000");
  EXPECT_EQ(Header(headers, "x-ratelimit-remaining-tokens"), "100");
  EXPECT_EQ(Header(headers, "x-ratelimit-reset-tokens"), "54s");
}

// A key file that was changed applies to the next request, in either direction.
TEST_F(RateLimitsTest, ChangedLimitsApplyAtOnce) {
  Caller a{.name = "a", .limits = {.requests_per_minute = 100}};
  ASSERT_TRUE(limits_->Admit(a, now_).ok());
  a.limits.requests_per_minute = 1;
  EXPECT_TRUE(limits_->Admit(a, now_).ok());
  EXPECT_FALSE(limits_->Admit(a, now_).ok());
  a.limits.requests_per_minute = 0;
  EXPECT_TRUE(limits_->Admit(a, now_).ok());
}

}  // namespace
}  // namespace spl::router
