#include "kernels/selection/cacheblend/value_deviation.h"

#include "tests/kernels/support/kernel_test_util.h"
#include "tests/kernels/support/paged_kv.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

TEST(ValueDeviation, IsTheSquaredDistanceToTheCachedValues) {
  Random random(97);
  constexpr int32_t kDim = 16, kLen = 150;
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kE4M3}) {
    TestPool pool(dtype, kDim, 8);
    std::vector<TestStream> streams;
    std::vector<std::span<const int32_t>> tables;
    for (int h = 0; h < 2; ++h) {
      streams.push_back(MakeStream(random, kLen, kDim));
      pool.Place(streams.back());
    }
    for (const TestStream& s : streams) tables.emplace_back(s.page_table);
    const std::vector<int32_t> positions = {0, 5, 64, 149};
    std::vector<float> qkv = random.Normals(4 * (4 + 2 * 2) * kDim);
    std::vector<float> want(4);
    for (int i = 0; i < 4; ++i) {
      double sum = 0;
      for (int h = 0; h < 2; ++h) {
        for (int c = 0; c < kDim; ++c) {
          const int32_t page = streams[h].page_table[positions[i] / 64];
          const float cached = KvElement(pool.view(), pool.view().v(page), positions[i] % 64, c);
          sum += std::pow(static_cast<double>(qkv[i * 8 * kDim + (6 + h) * kDim + c]) - cached, 2);
        }
      }
      want[i] = static_cast<float>(sum);
    }
    TestContext t(DetectCpuIsa());
    for (const auto op : {ref::ValueDeviation, cpu::ValueDeviation}) {
      std::vector<float> got(4);
      ASSERT_TRUE(op(t.ctx, {.qkv = qkv.data(),
                             .num_qo_heads = 4,
                             .num_kv_heads = 2,
                             .head_dim = kDim,
                             .pool = pool.view(),
                             .rows = {0, 4, positions, tables},
                             .scores = got.data()})
                      .ok());
      ExpectClose(got, want, DType::kF32, "deviation");
    }
  }
}

}  // namespace
}  // namespace spl::kernels
