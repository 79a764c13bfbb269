#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/base/status.h"
#include "services/router/dispatch/attempt_history.h"
#include "services/router/dispatch/failures.h"
#include "services/router/dispatch/request_prompt.h"
#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

FleetSnapshot FleetOf(std::vector<std::string> prefill, std::vector<std::string> decode) {
  FleetSnapshot fleet;
  for (std::string& id : prefill) fleet.prefill.push_back({.worker_id = std::move(id)});
  for (std::string& id : decode) fleet.decode.push_back({.worker_id = std::move(id)});
  return fleet;
}

TEST(AttemptHistoryTest, APairIsFreshWhenNeitherWorkerHasFailed) {
  const FleetSnapshot fleet = FleetOf({"p0", "p1"}, {"d0"});
  AttemptHistory history;
  EXPECT_TRUE(history.HasFreshPair(fleet, 100));
  history.failed = {"p0"};
  EXPECT_TRUE(history.HasFreshPair(fleet, 100));
  history.failed = {"p0", "p1"};
  EXPECT_FALSE(history.HasFreshPair(fleet, 100));
  history.failed = {"d0"};
  EXPECT_FALSE(history.HasFreshPair(fleet, 100));
}

TEST(AttemptHistoryTest, ADecodeWorkersOwnPrefillCountsForShortPromptsOnly) {
  FleetSnapshot fleet = FleetOf({"p0"}, {"d0", "d1"});
  fleet.local.push_back(
      {.worker_id = "d1/local", .local = PrefillView::Local{.decode_id = "d1", .max_new_tokens = 256}});
  AttemptHistory history;
  history.failed = {"p0"};
  EXPECT_TRUE(history.HasFreshPair(fleet, 256));
  EXPECT_FALSE(history.HasFreshPair(fleet, 257));
  history.failed.insert("d1/local");
  EXPECT_FALSE(history.HasFreshPair(fleet, 10));
}

TEST(FailuresTest, ClientsSeeTheirOwnFaultsAsTheyAreAndTheClustersAsUnavailable) {
  for (const auto code : {absl::StatusCode::kInvalidArgument, absl::StatusCode::kUnimplemented,
                          absl::StatusCode::kOutOfRange, absl::StatusCode::kPermissionDenied}) {
    EXPECT_TRUE(IsRequestsFault(code));
    EXPECT_TRUE(GivenUpByWorker(code));
    EXPECT_FALSE(IsWorkersFault(code));
    EXPECT_EQ(ToClientStatus(absl::Status(code, "x"), 2).code(), code);
  }
  EXPECT_EQ(ToClientStatus(absl::ResourceExhaustedError("x"), 2).code(), absl::StatusCode::kResourceExhausted);
  for (const auto code : {absl::StatusCode::kUnavailable, absl::StatusCode::kInternal, absl::StatusCode::kUnknown,
                          absl::StatusCode::kDataLoss, absl::StatusCode::kDeadlineExceeded}) {
    EXPECT_FALSE(IsRequestsFault(code));
    EXPECT_EQ(IsWorkersFault(code), code != absl::StatusCode::kDeadlineExceeded);
    const absl::Status seen = ToClientStatus(absl::Status(code, "x"), 2);
    EXPECT_EQ(seen.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(MessageOf(seen), "the request failed after 2 attempts: x");
  }
  // Only the worker's own word says that its writes have ended.
  EXPECT_FALSE(GivenUpByWorker(absl::StatusCode::kUnavailable));
  EXPECT_FALSE(GivenUpByWorker(absl::StatusCode::kCancelled));
}

class CheckAndClampTest : public testing::Test {
 protected:
  absl::Status Check(size_t num_tokens) {
    prompt_.tokens.assign(num_tokens, 1);
    return CheckAndClamp(request_, prompt_, fleet_, kContext, 1000);
  }

  static constexpr uint64_t kContext = 100;
  GenerationRequest request_{.prompt = std::string("text")};
  RequestPrompt prompt_;
  FleetSnapshot fleet_ = FleetOf({"p0"}, {"d0"});
};

TEST_F(CheckAndClampTest, TheAnswerGetsTheRoomBehindThePrompt) {
  ASSERT_TRUE(Check(60).ok());
  EXPECT_EQ(request_.sampling.max_tokens, 40u);
  request_.sampling.max_tokens = 10;
  request_.sampling.min_tokens = 20;
  ASSERT_TRUE(Check(60).ok());
  EXPECT_EQ(request_.sampling.max_tokens, 10u);
  EXPECT_EQ(request_.sampling.min_tokens, 10u);
  fleet_.decode[0].max_sequence_tokens = 64;
  request_.sampling.max_tokens.reset();
  ASSERT_TRUE(Check(60).ok());
  EXPECT_EQ(request_.sampling.max_tokens, 4u);
}

TEST_F(CheckAndClampTest, PromptsThatFitNowhereAreRefusedByName) {
  EXPECT_EQ(ParamOf(Check(0)), "prompt");
  EXPECT_TRUE(Check(99).ok());
  EXPECT_EQ(Check(100).code(), absl::StatusCode::kInvalidArgument);
  fleet_.prefill[0].max_prompt_tokens = 50;
  EXPECT_TRUE(Check(50).ok());
  EXPECT_THAT(std::string(Check(51).message()), testing::HasSubstr("a prefill worker holds 50"));
  fleet_.prefill.push_back({.worker_id = "p1", .max_prompt_tokens = 80});
  EXPECT_TRUE(Check(80).ok());  // one of them is enough
  request_.sampling.stop_token_ids = {1000};
  EXPECT_EQ(ParamOf(Check(10)), "stop_token_ids");
}

}  // namespace
}  // namespace spl::router
