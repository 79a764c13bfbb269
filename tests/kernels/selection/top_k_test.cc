#include "kernels/selection/top_k.h"

#include "kernels/selection/sparsex/pool_scores.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

std::vector<int32_t> Largest(absl::Status (*op)(const KernelContext&, const TopKArgs&),
                             const std::vector<float>& scores, int64_t k) {
  std::vector<int32_t> out(static_cast<size_t>(k), -1);
  EXPECT_TRUE(op({}, {scores.data(), static_cast<int64_t>(scores.size()), k, out.data()}).ok());
  return out;
}

TEST(TopK, EqualsTheStableSort) {
  Random random(95);
  for (int i = 0; i < 200; ++i) {
    std::vector<float> scores = random.Normals(static_cast<size_t>(random.Int(1, 3000)));
    if (i % 2 == 0) {
      for (float& s : scores) s = static_cast<float>(random.Int(-3, 3));  // many ties
    }
    const int64_t k = random.Int(0, static_cast<int32_t>(scores.size()));
    EXPECT_EQ(Largest(cpu::TopK, scores, k), Largest(ref::TopK, scores, k));
  }
}

TEST(TopK, TiesGoToTheLowerIndexAndNanIsLast) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const auto op : {ref::TopK, cpu::TopK}) {
    EXPECT_EQ(Largest(op, {1, 2, 2, 2, 0}, 2), (std::vector<int32_t>{1, 2}));
    EXPECT_EQ(Largest(op, {nan, -inf, 3, nan}, 3), (std::vector<int32_t>{0, 1, 2}));
    EXPECT_EQ(Largest(op, {-0.0f, 0.0f, inf}, 2), (std::vector<int32_t>{0, 2}));
  }
}

// docs/methods/sparsex.md, Guarantees: the chosen are nested in k.
TEST(TopK, SmallerChoicesAreInLargerOnes) {
  Random random(96);
  std::vector<float> scores(500);
  for (float& s : scores) s = static_cast<float>(random.Int(0, 40));
  for (int64_t k = 1; k < 500; k += 7) {
    const std::vector<int32_t> small = Largest(cpu::TopK, scores, k), large = Largest(cpu::TopK, scores, k + 1);
    EXPECT_TRUE(std::includes(large.begin(), large.end(), small.begin(), small.end())) << k;
  }
}

TEST(TopK, RefusesMoreThanThereAre) {
  const std::vector<float> scores(4);
  std::vector<int32_t> out(8);
  EXPECT_FALSE(cpu::TopK({}, {scores.data(), 4, 5, out.data()}).ok());
  EXPECT_FALSE(cpu::TopK({}, {nullptr, 4, 1, out.data()}).ok());
  EXPECT_FALSE(cpu::TopK({}, {scores.data(), kTopKScoresMax + 1, 1, out.data()}).ok());
}

}  // namespace
}  // namespace spl::kernels
