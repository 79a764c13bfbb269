#include "kernels/selection/sparsex/pool_scores.h"

#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

TEST(PoolScores, IsTheLargestOfTheNeighbourhoodInEveryVariant) {
  Random random(21);
  ThreadPool pool(3);
  for (const int64_t count : {int64_t{1}, int64_t{7}, int64_t{64}, int64_t{4097}, int64_t{20'000}}) {
    const std::vector<float> scores = random.Normals(static_cast<size_t>(count));
    for (const int32_t radius : {0, 1, 4, 64}) {
      std::vector<float> want(scores.size()), got(scores.size());
      ASSERT_TRUE(ref::PoolScores({}, {scores.data(), count, radius, want.data()}).ok());
      ASSERT_TRUE(cpu::PoolScores({.pool = &pool}, {scores.data(), count, radius, got.data()}).ok());
      EXPECT_EQ(got, want) << count << ", radius " << radius;
      if (radius == 0) {
        EXPECT_EQ(want, scores);
      }
    }
  }
}

TEST(PoolScores, OneScoreSpeaksForItsNeighbours) {
  std::vector<float> scores(10, 0.0f), out(10);
  scores[4] = 2;
  scores[9] = 1;
  ASSERT_TRUE(cpu::PoolScores({}, {scores.data(), 10, 2, out.data()}).ok());
  EXPECT_EQ(out, (std::vector<float>{0, 0, 2, 2, 2, 2, 2, 1, 1, 1}));
}

TEST(PoolScores, RefusesBadArguments) {
  std::vector<float> scores(4), out(4);
  EXPECT_FALSE(cpu::PoolScores({}, {scores.data(), 4, -1, out.data()}).ok());
  EXPECT_FALSE(cpu::PoolScores({}, {scores.data(), 4, kPoolRadiusMax + 1, out.data()}).ok());
  EXPECT_FALSE(cpu::PoolScores({}, {scores.data(), 4, 1, scores.data()}).ok());
  EXPECT_FALSE(cpu::PoolScores({}, {nullptr, 4, 1, out.data()}).ok());
  EXPECT_TRUE(cpu::PoolScores({}, {nullptr, 0, 1, nullptr}).ok());
}

}  // namespace
}  // namespace spl::kernels
