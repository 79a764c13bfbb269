#include "services/router/admission.h"

#include <gtest/gtest.h>

#include "services/router/api_error.h"

namespace spl::router {
namespace {

class AdmissionTest : public ::testing::Test {
 protected:
  std::function<void()> Note(uint64_t id) {
    return [this, id] { started_.push_back(id); };
  }
  Metrics metrics_;
  std::vector<uint64_t> started_;
};

TEST_F(AdmissionTest, RunsAtOnceUpToTheCap) {
  Admission admission({.max_running = 2, .max_queue = 1}, metrics_);
  for (uint64_t id = 1; id <= 3; ++id) EXPECT_TRUE(admission.Enter(id, Note(id)).ok());
  EXPECT_EQ(started_, (std::vector<uint64_t>{1, 2}));
  const absl::Status full = admission.Enter(4, Note(4));
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_GE(RetryAfterMsOf(full).value_or(0), 1000u);
  admission.Leave(1);
  EXPECT_EQ(started_.back(), 3u);
}

TEST_F(AdmissionTest, FullClusterIsProbedByOneRequest) {
  Admission admission({.max_running = 100, .max_queue = 10}, metrics_);
  EXPECT_TRUE(admission.Enter(1, Note(1)).ok());
  EXPECT_TRUE(admission.WaitForRoom(1, Note(1)).ok());
  for (uint64_t id = 2; id <= 4; ++id) EXPECT_TRUE(admission.Enter(id, Note(id)).ok());
  EXPECT_EQ(started_, (std::vector<uint64_t>{1}));
  admission.OnRoom();
  EXPECT_EQ(started_, (std::vector<uint64_t>{1, 1}));  // the one at the head, alone
  admission.OnRoom();
  EXPECT_EQ(started_.size(), 2u);
  admission.Reserved(1);
  EXPECT_EQ(started_, (std::vector<uint64_t>{1, 1, 2}));
  EXPECT_TRUE(admission.WaitForRoom(2, Note(2)).ok());  // full again: back to the head, everything stands still
  EXPECT_EQ(admission.num_waiting(), 3u);
  admission.Leave(1);
  EXPECT_EQ(started_.back(), 2u);
  admission.Reserved(2);
  admission.Reserved(3);
  EXPECT_EQ(started_, (std::vector<uint64_t>{1, 1, 2, 2, 3, 4}));
}

TEST_F(AdmissionTest, LeavingWhileWaitingOrProbingKeepsTheQueueMoving) {
  Admission admission({.max_running = 100, .max_queue = 10}, metrics_);
  EXPECT_TRUE(admission.Enter(1, Note(1)).ok());
  EXPECT_TRUE(admission.WaitForRoom(1, Note(1)).ok());
  for (uint64_t id = 2; id <= 3; ++id) EXPECT_TRUE(admission.Enter(id, Note(id)).ok());
  admission.Leave(1);  // gave up while waiting
  admission.OnRoom();
  EXPECT_EQ(started_.back(), 2u);
  admission.Leave(2);  // gave up while probing
  EXPECT_EQ(started_.back(), 3u);
  admission.Leave(3);
  EXPECT_EQ(admission.num_running(), 0u);
  EXPECT_EQ(admission.num_waiting(), 0u);
}

TEST_F(AdmissionTest, WithoutAQueueNoRoomIsARefusal) {
  Admission admission({.max_running = 100, .max_queue = 0}, metrics_);
  EXPECT_TRUE(admission.Enter(1, Note(1)).ok());
  EXPECT_EQ(admission.WaitForRoom(1, Note(1)).code(), absl::StatusCode::kResourceExhausted);
  admission.Leave(1);
  EXPECT_TRUE(admission.Enter(2, Note(2)).ok());
  EXPECT_EQ(started_.back(), 2u);
}

TEST_F(AdmissionTest, ClosedRefuses) {
  Admission admission({}, metrics_);
  admission.Close();
  EXPECT_EQ(admission.Enter(1, Note(1)).code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace spl::router
