#include "kernels/embedding/scatter_rows.h"

#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

TEST(ScatterRows, PutsRowsBackAndZeroesTheOthersInEveryVariant) {
  Random random(32);
  ThreadPool pool(3);
  for (const int64_t num_rows : {1, 3, 64, 1000}) {
    for (const int share : {0, 1, 5, 10}) {  // tenths that are chosen
      constexpr int64_t kWidth = 68;
      std::vector<int32_t> ids;
      for (int32_t row = 0; row < num_rows; ++row) {
        if (row * 7 % 10 < share) ids.push_back(row);
      }
      const std::vector<float> rows = random.Normals(ids.size() * kWidth);
      std::vector<float> want(static_cast<size_t>(num_rows * kWidth), NAN), got = want;
      ASSERT_TRUE(ref::ScatterRows({}, {rows.data(), ids, num_rows, kWidth, want.data()}).ok());
      ASSERT_TRUE(cpu::ScatterRows({.pool = &pool}, {rows.data(), ids, num_rows, kWidth, got.data()}).ok());
      EXPECT_EQ(got, want);
      for (size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(got[static_cast<size_t>(ids[i]) * kWidth], rows[i * kWidth]);
      EXPECT_EQ(static_cast<size_t>(std::count_if(got.begin(), got.end(), [](float x) { return x != 0; })),
                rows.size());
    }
  }
}

TEST(ScatterRows, RefusesBadArguments) {
  std::vector<float> rows(8), out(16);
  const auto run = [&](std::vector<int32_t> ids, const float* from, float* to) {
    return cpu::ScatterRows({}, {from, ids, 4, 4, to}).ok();
  };
  EXPECT_TRUE(run({1, 3}, rows.data(), out.data()));
  EXPECT_FALSE(run({3, 1}, rows.data(), out.data()));
  EXPECT_FALSE(run({1, 1}, rows.data(), out.data()));
  EXPECT_FALSE(run({1, 4}, rows.data(), out.data()));
  EXPECT_FALSE(run({-1}, rows.data(), out.data()));
  EXPECT_FALSE(run({1}, nullptr, out.data()));
  EXPECT_FALSE(run({1}, rows.data(), rows.data()));
}

}  // namespace
}  // namespace spl::kernels
