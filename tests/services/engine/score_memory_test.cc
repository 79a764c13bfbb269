#include "services/engine/execution/score_memory.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/engine_devices.h"

namespace spl::engine {
namespace {

class ScoreMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto devices = test::DevicesOf(test::OnGpu() ? "cuda" : "cpu");
    ASSERT_TRUE(devices.ok()) << devices.status();
    backend_ = std::move(devices->front());
    auto session = backend_->NewSession({.num_threads = 1,
                                         .max_rows = 1,
                                         .max_sequences = 1,
                                         .num_layers = 1,
                                         .num_kv_heads = 1,
                                         .max_pages_per_stream = 1});
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
  }
  std::unique_ptr<kernels::Buffer> Take(int64_t count) {
    auto scores = memory_->Take(*backend_, *session_, count);
    EXPECT_TRUE(scores.ok()) << scores.status();
    return *std::move(scores);
  }
  // The scores, read behind all work of the session.
  std::vector<float> Read(const kernels::Buffer& scores) {
    const auto host = session_->ReadBack(scores.data(), scores.size());
    EXPECT_TRUE(host.ok()) << host.status();
    const auto* values = static_cast<const float*>(*host);
    return {values, values + scores.size() / sizeof(float)};
  }
  void Write(const kernels::Buffer& scores, float value) {
    const std::vector<float> values(scores.size() / sizeof(float), value);
    EXPECT_TRUE(session_->Synchronize().ok());
    EXPECT_TRUE(backend_->Copy(kernels::CopyKind::kUpload, scores.data(), values.data(), scores.size()).ok());
  }

  Devices::value_type backend_;
  std::unique_ptr<kernels::Session> session_;
  std::unique_ptr<ScoreMemory> memory_ = std::make_unique<ScoreMemory>();
};

TEST_F(ScoreMemoryTest, TheNextPromptGetsTheSameMemoryZeroed) {
  auto first = Take(2'000);
  const void* const data = first->data();
  Write(*first, 3.0f);
  first.reset();
  const auto second = Take(1'500);
  EXPECT_EQ(second->data(), data);
  EXPECT_EQ(Read(*second), std::vector<float>(1'500, 0.0f));
}

TEST_F(ScoreMemoryTest, PromptsAtTheSameTimeHaveMemoryOfTheirOwn) {
  const auto first = Take(100), second = Take(100);
  EXPECT_NE(first->data(), second->data());
  Write(*first, 1.0f);
  EXPECT_EQ(Read(*second), std::vector<float>(100, 0.0f));
}

TEST_F(ScoreMemoryTest, TheSmallestThatIsLargeEnoughIsTaken) {
  auto large = Take(100'000), small = Take(10'000);
  const void* const data = small->data();
  large.reset();
  small.reset();
  EXPECT_EQ(Take(9'000)->data(), data);
  EXPECT_EQ(Read(*Take(50'000)), std::vector<float>(50'000, 0.0f));
}

// Memory that cannot be kept is freed: a new prompt does not find it.
TEST_F(ScoreMemoryTest, NeitherManyNorHugeBuffersAreKept) {
  std::vector<std::unique_ptr<kernels::Buffer>> scores;
  std::vector<const void*> kept;
  for (size_t i = 0; i <= ScoreMemory::kMostKept; ++i) {
    scores.push_back(Take(int64_t{2'000} << i));
    if (i > 0) kept.push_back(scores.back()->data());
  }
  scores.clear();
  auto huge = Take(static_cast<int64_t>(2 * ScoreMemory::kLargestKept / sizeof(float)));
  huge.reset();
  // All that wait now are those but the smallest one.
  for (size_t i = 0; i < kept.size(); ++i) {
    scores.push_back(Take(1));
    EXPECT_NE(std::ranges::find(kept, scores.back()->data()), kept.end());
  }
}

TEST_F(ScoreMemoryTest, ScoresOutliveTheirMemorysOwner) {
  const auto scores = Take(10);
  memory_.reset();
  EXPECT_EQ(Read(*scores), std::vector<float>(10, 0.0f));
}

}  // namespace
}  // namespace spl::engine
