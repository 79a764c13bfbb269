#include "services/router/admission/admission.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

class AdmissionTest : public ::testing::Test {
 protected:
  QueuedRequest Request(uint64_t id, const std::string& tenant = "a") {
    return {.id = id,
            .tenant = tenant,
            .tokens = 8192,  // one turn
            .start = [this, id] { started_.push_back(id); },
            .refuse = [this, id](const absl::Status& status) { refused_[id] = status.code(); }};
  }
  Metrics metrics_;
  std::vector<uint64_t> started_;
  std::map<uint64_t, absl::StatusCode> refused_;
};

TEST_F(AdmissionTest, RunsAtOnceUpToTheCap) {
  Admission admission({.max_running = 2, .max_queue = 1}, metrics_);
  for (uint64_t id = 1; id <= 3; ++id) EXPECT_TRUE(admission.Enter(Request(id)).ok());
  EXPECT_EQ(started_, (std::vector<uint64_t>{1, 2}));
  const absl::Status full = admission.Enter(Request(4));
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_GE(RetryAfterMsOf(full).value_or(0), 1000u);
  admission.Leave(1);
  EXPECT_EQ(started_.back(), 3u);
}

TEST_F(AdmissionTest, FullClusterIsProbedByOneRequest) {
  Admission admission({.max_running = 100, .max_queue = 10}, metrics_);
  EXPECT_TRUE(admission.Enter(Request(1)).ok());
  EXPECT_TRUE(admission.WaitForRoom(Request(1)).ok());
  for (uint64_t id = 2; id <= 4; ++id) EXPECT_TRUE(admission.Enter(Request(id)).ok());
  EXPECT_EQ(started_, (std::vector<uint64_t>{1}));
  admission.OnRoom();
  EXPECT_EQ(started_, (std::vector<uint64_t>{1, 1}));  // the one at the head, alone
  admission.OnRoom();
  EXPECT_EQ(started_.size(), 2u);
  admission.Reserved(1);
  EXPECT_EQ(started_, (std::vector<uint64_t>{1, 1, 2}));
  EXPECT_TRUE(admission.WaitForRoom(Request(2)).ok());  // full again: back to the head, everything stands still
  EXPECT_EQ(admission.num_waiting(), 3u);
  admission.Leave(1);
  EXPECT_EQ(started_.back(), 2u);
  admission.Reserved(2);
  admission.Reserved(3);
  EXPECT_EQ(started_, (std::vector<uint64_t>{1, 1, 2, 2, 3, 4}));
}

TEST_F(AdmissionTest, LeavingWhileWaitingOrProbingKeepsTheQueueMoving) {
  Admission admission({.max_running = 100, .max_queue = 10}, metrics_);
  EXPECT_TRUE(admission.Enter(Request(1)).ok());
  EXPECT_TRUE(admission.WaitForRoom(Request(1)).ok());
  for (uint64_t id = 2; id <= 3; ++id) EXPECT_TRUE(admission.Enter(Request(id)).ok());
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
  EXPECT_TRUE(admission.Enter(Request(1)).ok());
  EXPECT_EQ(admission.WaitForRoom(Request(1)).code(), absl::StatusCode::kResourceExhausted);
  admission.Leave(1);
  EXPECT_TRUE(admission.Enter(Request(2)).ok());
  EXPECT_EQ(started_.back(), 2u);
}

// One tenant cannot keep others out by filling the queue.
TEST_F(AdmissionTest, AFullQueueStillHasRoomForOtherTenants) {
  Admission admission({.max_running = 1, .max_queue = 4}, metrics_);
  for (uint64_t id = 1; id <= 5; ++id) EXPECT_TRUE(admission.Enter(Request(id, "greedy")).ok());
  EXPECT_EQ(admission.Enter(Request(6, "greedy")).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(admission.Enter(Request(7, "modest")).ok());
  EXPECT_EQ(refused_, (std::map<uint64_t, absl::StatusCode>{{5, absl::StatusCode::kResourceExhausted}}));
  admission.Leave(5);
  EXPECT_EQ(admission.num_waiting(), 4u);
  EXPECT_TRUE(admission.Enter(Request(8, "modest")).ok());  // two and two: from here on it is refused
  EXPECT_EQ(admission.Enter(Request(9, "modest")).code(), absl::StatusCode::kResourceExhausted);
  admission.Leave(1);
  admission.Reserved(started_.back());
  admission.Leave(started_.back());
  EXPECT_EQ(std::set<uint64_t>(started_.begin() + 1, started_.end()), (std::set<uint64_t>{2, 7})) << "both had a turn";
}

TEST_F(AdmissionTest, ClosedRefuses) {
  Admission admission({}, metrics_);
  admission.Close();
  EXPECT_EQ(admission.Enter(Request(1)).code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace spl::router
