// Who may write to a ticket, who may not any more, and when it can be said that nobody does.
#include "services/prefill_work/ticket_guard.h"

#include <gtest/gtest.h>

#include <optional>

namespace spl::prefill {
namespace {

using namespace std::chrono_literals;

class TicketGuardTest : public ::testing::Test {
 protected:
  static TicketGuard::CancelFlag Flag() { return std::make_shared<std::atomic<bool>>(false); }
  void Revoke(const RandomId& ticket, std::chrono::milliseconds ttl = 10s) {
    answer_.reset();
    guard_.Revoke(ticket, ttl, [this](const absl::Status& status) { answer_ = status; });
  }

  FakeClock clock_;
  TicketGuard guard_{{.max_revoked = 3, .max_used = 3}, clock_};
  const RandomId ticket_ = RandomId::Make();
  std::optional<absl::Status> answer_;
};

TEST_F(TicketGuardTest, ARevokedTicketIsRefusedForItsTtl) {
  Revoke(ticket_);
  ASSERT_TRUE(answer_.has_value());
  EXPECT_TRUE(answer_->ok());
  clock_.Advance(10s - 1ms);
  EXPECT_EQ(guard_.Begin(ticket_, Flag()).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(guard_.stats().num_refused, 1u);
  clock_.Advance(1ms);
  EXPECT_TRUE(guard_.Begin(ticket_, Flag()).ok());
  EXPECT_TRUE(guard_.Begin(RandomId::Make(), Flag()).ok());
}

TEST_F(TicketGuardTest, TheAnswerComesWhenTheWritesAreFlushed) {
  const auto flag = Flag();
  auto hold = *guard_.Begin(ticket_, flag);
  hold->NoteWriting();
  Revoke(ticket_);
  EXPECT_FALSE(answer_.has_value());
  EXPECT_TRUE(flag->load());
  hold->EndFlushed();
  ASSERT_TRUE(answer_.has_value());
  EXPECT_TRUE(answer_->ok());
  hold.reset();  // says nothing more
  EXPECT_EQ(guard_.stats().num_writing, 0u);
  EXPECT_EQ(guard_.Begin(ticket_, Flag()).status().code(), absl::StatusCode::kAborted);
}

TEST_F(TicketGuardTest, WritesThatWereNotFlushedAreNotCalledQuiet) {
  auto hold = *guard_.Begin(ticket_, Flag());
  hold->NoteWriting();
  Revoke(ticket_);
  hold.reset();
  ASSERT_TRUE(answer_.has_value());
  EXPECT_EQ(answer_->code(), absl::StatusCode::kUnavailable);
  Revoke(ticket_);  // whoever asks again does not hear otherwise
  ASSERT_TRUE(answer_.has_value());
  EXPECT_EQ(answer_->code(), absl::StatusCode::kUnavailable);
}

TEST_F(TicketGuardTest, ACallThatWroteNothingIsQuiet) {
  auto hold = *guard_.Begin(ticket_, Flag());
  Revoke(ticket_);
  EXPECT_FALSE(answer_.has_value());
  hold.reset();
  ASSERT_TRUE(answer_.has_value());
  EXPECT_TRUE(answer_->ok());
}

TEST_F(TicketGuardTest, TwoCallsDoNotWriteToOneTicket) {
  const auto hold = *guard_.Begin(ticket_, Flag());
  EXPECT_EQ(guard_.Begin(ticket_, Flag()).status().code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(TicketGuardTest, ATicketIsGoodForOnePrompt) {
  {
    const auto refused = *guard_.Begin(ticket_, Flag());  // a call that does not come as far as to use it
  }
  {
    const auto hold = *guard_.Begin(ticket_, Flag());
    EXPECT_TRUE(hold->Use().ok());
  }
  {
    const auto again = *guard_.Begin(ticket_, Flag());
    EXPECT_EQ(again->Use().code(), absl::StatusCode::kAlreadyExists);
  }
  for (int i = 0; i < 3; ++i) EXPECT_TRUE((*guard_.Begin(RandomId::Make(), Flag()))->Use().ok());
  EXPECT_TRUE((*guard_.Begin(ticket_, Flag()))->Use().ok()) << "the last three are remembered";
}

TEST_F(TicketGuardTest, WhatIsRememberedIsBoundedAndMakesRoom) {
  for (int i = 0; i < 3; ++i) {
    Revoke(RandomId::Make());
    EXPECT_TRUE(answer_->ok());
  }
  const auto flag = Flag();
  const auto hold = *guard_.Begin(ticket_, flag);
  Revoke(ticket_);
  ASSERT_TRUE(answer_.has_value());  // and it does not wait for the writer
  EXPECT_EQ(answer_->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(flag->load());
  clock_.Advance(10s);
  Revoke(RandomId::Make());
  EXPECT_TRUE(answer_->ok());
  EXPECT_EQ(guard_.stats().num_revoked, 1u);
}

TEST_F(TicketGuardTest, RevokingAgainLengthensAndDoesNotShorten) {
  Revoke(ticket_, 10s);
  Revoke(ticket_, 1s);
  clock_.Advance(5s);
  EXPECT_EQ(guard_.Begin(ticket_, Flag()).status().code(), absl::StatusCode::kAborted);
  Revoke(ticket_, 10s);
  clock_.Advance(9s);
  EXPECT_EQ(guard_.Begin(ticket_, Flag()).status().code(), absl::StatusCode::kAborted);
  Revoke(RandomId::Make());  // prunes what is over: not this one
  EXPECT_EQ(guard_.Begin(ticket_, Flag()).status().code(), absl::StatusCode::kAborted);
}

}  // namespace
}  // namespace spl::prefill
