#include "kernels/norm/row_norms.h"

#include <cmath>

#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

TEST(RowNorms, IsTheLengthOfEachRowInEveryVariant) {
  Random random(31);
  ThreadPool pool(3);
  for (const int64_t rows : {1, 5, 700}) {
    for (const int64_t width : {4, 64, 100, 4096}) {
      const std::vector<float> x = random.Normals(static_cast<size_t>(rows * width));
      std::vector<float> want(static_cast<size_t>(rows)), got(want.size()), alone(want.size());
      ASSERT_TRUE(ref::RowNorms({}, {x.data(), rows, width, want.data()}).ok());
      ASSERT_TRUE(cpu::RowNorms({.pool = &pool}, {x.data(), rows, width, got.data()}).ok());
      for (int64_t i = 0; i < rows; ++i) {
        double sum = 0;
        for (int64_t c = 0; c < width; ++c) sum += double{x[i * width + c]} * x[i * width + c];
        const auto at = static_cast<size_t>(i);
        EXPECT_NEAR(want[at], std::sqrt(sum), 1e-6 * std::sqrt(sum));
        EXPECT_NEAR(got[at], want[at], 1e-5 * want[at]);
        ASSERT_TRUE(cpu::RowNorms({}, {x.data() + i * width, 1, width, &alone[at]}).ok());
      }
      EXPECT_EQ(alone, got);  // the same in any batch, to the bit
    }
  }
}

TEST(RowNorms, RefusesBadArguments) {
  std::vector<float> x(8), out(2);
  EXPECT_FALSE(cpu::RowNorms({}, {x.data(), 2, 0, out.data()}).ok());
  EXPECT_FALSE(cpu::RowNorms({}, {x.data(), 2, 3, out.data()}).ok());
  EXPECT_FALSE(cpu::RowNorms({}, {x.data(), 2, 4, nullptr}).ok());
  EXPECT_FALSE(ref::RowNorms({}, {x.data(), -1, 4, out.data()}).ok());
  EXPECT_TRUE(cpu::RowNorms({}, {nullptr, 0, 4, nullptr}).ok());
}

}  // namespace
}  // namespace spl::kernels
