#include "kernels/collective/collective.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "kernels/backend/backend.h"

namespace spl::kernels {
namespace {

using namespace std::chrono_literals;

// Runs body(rank) on a thread of its own for every rank.
template <typename Body>
void OnEveryRank(int size, const Body& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back([&, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

TEST(HostCollective, SumsInRankOrderOverManyCallsAndOddCounts) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  for (const int size : {1, 2, 3, 4, 8}) {
    auto group = MakeHostGroup(size, 20s);
    ASSERT_EQ(group.size(), static_cast<size_t>(size));
    const std::vector<int64_t> counts = {1, 0, 7, 4096, 1000, 3};
    std::vector<std::vector<std::vector<float>>> in(size), out(size);
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(group[rank]->rank(), rank);
      EXPECT_EQ(group[rank]->size(), size);
      std::mt19937 random(seed + rank);
      for (const int64_t count : counts) {
        std::vector<float> values(count);
        for (float& x : values) x = std::normal_distribution<float>(0, 1)(random);
        in[rank].push_back(values);
      }
    }
    out = in;
    OnEveryRank(size, [&](int rank) {
      for (auto& values : out[rank]) {
        const absl::Status s = group[rank]->AllReduceSum({}, values.data(), static_cast<int64_t>(values.size()));
        EXPECT_TRUE(s.ok()) << s;
      }
    });
    for (size_t call = 0; call < counts.size(); ++call) {
      std::vector<float> want = in[0][call];
      for (int rank = 1; rank < size; ++rank) {
        for (size_t i = 0; i < want.size(); ++i) want[i] += in[rank][call][i];
      }
      for (int rank = 0; rank < size; ++rank) EXPECT_EQ(out[rank][call], want) << size << " " << rank << " " << call;
    }
  }
}

TEST(HostCollective, AFailingRankEndsTheOthersWait) {
  auto group = MakeHostGroup(3, 60s);
  std::vector<float> values(10, 1.0f);
  std::vector<absl::Status> status(3);
  const auto start = std::chrono::steady_clock::now();
  OnEveryRank(3, [&](int rank) {
    std::vector<float> mine = values;
    if (rank == 1)
      group[1]->Abort(absl::InternalError("rank 1 is out of order"));
    else
      status[rank] = group[rank]->AllReduceSum({}, mine.data(), 10);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
  for (const int rank : {0, 2}) EXPECT_THAT(status[rank].ToString(), testing::HasSubstr("rank 1 is out of order"));
  // For good, whoever asks.
  EXPECT_FALSE(group[1]->AllReduceSum({}, values.data(), 10).ok());
  EXPECT_FALSE(group[0]->AllReduceSum({}, values.data(), 10).ok());
}

TEST(HostCollective, ARankThatDoesNotComeIsWaitedForOnlySoLong) {
  auto group = MakeHostGroup(2, 50ms);
  std::vector<float> values(10, 1.0f);
  const absl::Status alone = group[0]->AllReduceSum({}, values.data(), 10);
  EXPECT_EQ(alone.code(), absl::StatusCode::kDeadlineExceeded) << alone;
  EXPECT_THAT(alone.ToString(), testing::HasSubstr("1 of 2 ranks"));
  EXPECT_EQ(group[1]->AllReduceSum({}, values.data(), 10).code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(HostCollective, DifferentCountsAreAnErrorOnEveryRank) {
  auto group = MakeHostGroup(2, 20s);
  std::vector<absl::Status> status(2);
  OnEveryRank(2, [&](int rank) {
    std::vector<float> values(10, 1.0f);
    status[rank] = group[rank]->AllReduceSum({}, values.data(), 9 + rank);
  });
  for (const absl::Status& s : status) EXPECT_EQ(s.code(), absl::StatusCode::kInternal) << s;
}

TEST(HostCollective, BackendsOfTheHostMakeGroups) {
  const auto backend = MakeCpuBackend();
  const std::vector<const Backend*> ranks = {backend.get(), backend.get()};
  auto group = backend->NewGroup(ranks);
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_EQ((*group)[1]->rank(), 1);
}

}  // namespace
}  // namespace spl::kernels
