// Several GPUs of one machine: sums over ranks, also in recorded steps and after a failure, and copies between GPUs.
// Skipped where there are fewer than two.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>
#include <vector>

#include "kernels/backend/cuda/cuda_plugin.h"

namespace spl::kernels {
namespace {

using namespace std::chrono_literals;

class CudaGroupTest : public testing::Test {
 protected:
  static constexpr int kRanks = 2;

  void SetUp() override {
    for (int rank = 0; rank < kRanks; ++rank) {
      auto backend = MakeCudaBackend({.device = rank});
      if (!backend.ok()) GTEST_SKIP() << backend.status();
      backends_.push_back(*std::move(backend));
    }
    const std::vector<const Backend*> ranks = {backends_[0].get(), backends_[1].get()};
    auto group = backends_[0]->NewGroup(ranks);
    ASSERT_TRUE(group.ok()) << group.status();
    group_ = *std::move(group);
    for (int rank = 0; rank < kRanks; ++rank) {
      auto session = backends_[rank]->NewSession(
          {.max_rows = 8, .max_sequences = 1, .num_layers = 1, .num_kv_heads = 1, .max_pages_per_stream = 1});
      ASSERT_TRUE(session.ok()) << session.status();
      sessions_.push_back(*std::move(session));
      auto memory = backends_[rank]->Allocate(kCount * sizeof(float));
      ASSERT_TRUE(memory.ok()) << memory.status();
      memory_.push_back(*std::move(memory));
    }
  }
  void TearDown() override { sessions_.clear(); }  // before the communicators that recorded steps use

  template <typename Body>
  void OnEveryRank(const Body& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back([&, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  }
  float* data(int rank) const { return static_cast<float*>(memory_[rank]->data()); }
  void Upload(int rank, const std::vector<float>& values) {
    ASSERT_TRUE(
        backends_[rank]->Copy(CopyKind::kUpload, data(rank), values.data(), values.size() * sizeof(float)).ok());
  }
  std::vector<float> Download(int rank) {
    std::vector<float> values(kCount);
    EXPECT_TRUE(
        backends_[rank]->Copy(CopyKind::kDownload, values.data(), data(rank), values.size() * sizeof(float)).ok());
    return values;
  }
  static std::vector<float> Values(int rank, int round) {
    std::vector<float> values(kCount);
    for (int64_t i = 0; i < kCount; ++i) values[i] = static_cast<float>((i * 37 + rank * 11 + round * 5) % 1009) / 7.0f;
    return values;
  }

  static constexpr int64_t kCount = 100003;
  std::vector<std::unique_ptr<Backend>> backends_;
  std::vector<std::unique_ptr<Communicator>> group_;
  std::vector<std::unique_ptr<Session>> sessions_;
  std::vector<std::unique_ptr<Buffer>> memory_;
};

TEST_F(CudaGroupTest, SumsAndRecordedSumsAreThoseOfTheHost) {
  // The first run of a step is plain, the second records it, later ones replay it.
  for (int round = 0; round < 5; ++round) {
    for (int rank = 0; rank < kRanks; ++rank) Upload(rank, Values(rank, round));
    OnEveryRank([&](int rank) {
      const int32_t token = 0, position = 0;
      const std::vector<std::vector<int32_t>> tables(1, {0});
      const BatchSequence sequence{0, 1, 1, tables, 1};
      ASSERT_TRUE(sessions_[rank]->Stage({{&token, 1}, {&position, 1}, {&sequence, 1}}).ok());
      const absl::Status s = sessions_[rank]->RunStep(
          1, [&] { return group_[rank]->AllReduceSum(sessions_[rank]->context(), data(rank), kCount); });
      EXPECT_TRUE(s.ok()) << s;
      EXPECT_TRUE(sessions_[rank]->Synchronize().ok());
    });
    std::vector<float> want = Values(0, round);
    const std::vector<float> other = Values(1, round);
    for (int64_t i = 0; i < kCount; ++i) want[i] += other[i];
    for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(Download(rank), want) << round << " " << rank;
  }
}

TEST_F(CudaGroupTest, AbortEndsTheWaitOnTheGpu) {
  const auto start = std::chrono::steady_clock::now();
  std::promise<void> enqueued;
  OnEveryRank([&](int rank) {
    if (rank == 0) {
      (void)group_[0]->AllReduceSum(sessions_[0]->context(), data(0), kCount);
      enqueued.set_value();
      (void)sessions_[0]->Synchronize();  // returns, with whatever outcome
    } else {
      enqueued.get_future().wait();  // the GPU of rank 0 waits for this one
      group_[1]->Abort(absl::InternalError("rank 1 has failed"));
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
  const absl::Status later = group_[0]->AllReduceSum(sessions_[0]->context(), data(0), kCount);
  EXPECT_THAT(later.ToString(), testing::HasSubstr("rank 1 has failed"));
}

TEST_F(CudaGroupTest, SendsFromGpuToGpuAndChecksumsOfAPart) {
  constexpr int32_t kPages = 40, kFirst = 1000;
  std::vector<KvPoolView> pools;
  std::vector<std::unique_ptr<Buffer>> memory;
  for (int rank = 0; rank < kRanks; ++rank) {
    KvPoolView pool{.head_dim = 64, .num_pages = kPages, .first_page = kFirst * rank};
    auto buffer = backends_[rank]->Allocate(kPages * pool.page_bytes());
    ASSERT_TRUE(buffer.ok());
    memory.push_back(*std::move(buffer));
    pool.base = static_cast<std::byte*>(memory.back()->data());
    pools.push_back(pool);
  }
  ASSERT_TRUE(
      backends_[0]
          ->FillRandom({}, {.out = pools[0].base, .count = static_cast<int64_t>(memory[0]->size() / 2), .stream = 3})
          .ok());
  auto handle = backends_[1]->Export(*memory[1]);
  ASSERT_TRUE(handle.ok()) << handle.status();
  auto remote = backends_[0]->Import(*handle);
  ASSERT_TRUE(remote.ok()) << remote.status();
  // Page i goes to page kPages - 1 - i.
  std::vector<PageSend> pages;
  std::vector<int32_t> from, to;
  for (int32_t i = 0; i < kPages; ++i) {
    from.push_back(i);
    to.push_back(kFirst + kPages - 1 - i);
    pages.push_back(
        {static_cast<std::byte*>((*remote)->data()) + (kPages - 1 - i) * pools[1].page_bytes(), pools[0].k(i)});
  }
  auto sends = backends_[0]->NewPageSends(pools[0].page_bytes());
  ASSERT_TRUE(sends.ok()) << sends.status();
  std::vector<uint32_t> on_the_way;
  ASSERT_TRUE((*sends)->Start(pages, {}, std::chrono::steady_clock::time_point::max()).ok());
  ASSERT_TRUE((*sends)->Finish(on_the_way).ok());
  std::vector<uint32_t> sent(kPages), arrived(kPages);
  ASSERT_TRUE(backends_[0]->PageChecksums(pools[0], from, sent.data()).ok());
  ASSERT_TRUE(backends_[1]->PageChecksums(pools[1], to, arrived.data()).ok());
  EXPECT_EQ(sent, arrived);
  EXPECT_EQ(sent, on_the_way);
  EXPECT_NE(sent[0], sent[1]);
}

}  // namespace
}  // namespace spl::kernels
