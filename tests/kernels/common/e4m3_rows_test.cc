// Scales and codes of rows of K and V in e4m3 against their definition in e4m3_rows.h.
#include "kernels/common/e4m3_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/common/dtype.h"
#include "kernels/common/kv_pool.h"

namespace spl::kernels {
namespace {

TEST(E4M3RowsTest, TheScaleIsTheSmallestThatHoldsTheRow) {
  for (int exponent = -100; exponent <= 14; ++exponent) {
    for (const float mantissa : {1.0f, 1.5f, 1.75f, std::nextafter(1.75f, 2.0f), 1.99f}) {
      const float amax = std::ldexp(mantissa, exponent);
      const uint8_t scale = RowScaleOf(amax);
      ASSERT_LE(amax, kE4M3Max * RowScaleValue(scale)) << amax;
      ASSERT_GT(amax, kE4M3Max * RowScaleValue(static_cast<uint8_t>(scale - 1))) << amax;
    }
  }
  EXPECT_EQ(RowScaleOf(0), kMinRowScale);
  EXPECT_EQ(RowScaleOf(1e-45f), kMinRowScale);
  EXPECT_EQ(RowScaleOf(57344.0f), kMaxRowScale);
  EXPECT_EQ(RowScaleOf(3e38f), kMaxRowScale);
}

TEST(E4M3RowsTest, ARowIsWithinHalfAnUlpOfE4M3AndBf16HoldsIt) {
  constexpr int kDim = 128;
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> magnitude(-60, 12);
  for (int trial = 0; trial < 200; ++trial) {
    const float size = std::exp2(magnitude(rng));
    std::vector<float> x(kDim), back(kDim);
    for (float& v : x) v = size * normal(rng);
    std::vector<uint8_t> codes(kDim);
    const uint8_t scale = QuantizeRow(x.data(), kDim, codes.data());
    WidenRow(codes.data(), scale, kDim, back.data());
    const float smallest = RowScaleValue(scale) * 0x1p-9f;  // a subnormal step
    for (int c = 0; c < kDim; ++c) {
      ASSERT_LE(std::fabs(back[c] - x[c]), std::max(std::fabs(x[c]) / 16, smallest / 2)) << x[c];
      ASSERT_EQ(ToFloat(ToBf16(back[c])), back[c]);
    }
    // A second rounding changes nothing.
    std::vector<uint8_t> again(kDim);
    std::vector<float> twice(kDim);
    WidenRow(again.data(), QuantizeRow(back.data(), kDim, again.data()), kDim, twice.data());
    ASSERT_EQ(twice, back);
  }
}

TEST(E4M3RowsTest, HugeValuesSaturateAndWhatIsNotFiniteMakesTheRowNan) {
  std::vector<float> x{1e30f, -1e30f, 1.0f, 0.0f}, back(4);
  std::vector<uint8_t> codes(4);
  WidenRow(codes.data(), QuantizeRow(x.data(), 4, codes.data()), 4, back.data());
  EXPECT_EQ(back[0], 57344.0f);
  EXPECT_EQ(back[1], -57344.0f);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (size_t at = 0; at < 4; ++at) {
      std::vector<float> row{1, 2, 3, 4};
      row[at] = bad;
      const uint8_t scale = QuantizeRow(row.data(), 4, codes.data());
      EXPECT_EQ(scale, kNotFiniteScale);
      WidenRow(codes.data(), scale, 4, back.data());
      for (const float v : back) EXPECT_TRUE(std::isnan(v));
    }
  }
}

TEST(E4M3RowsTest, APageHoldsItsScales) {
  EXPECT_EQ(KvPageBytes(DType::kBF16, 128), 32768u);
  EXPECT_EQ(KvPageBytes(DType::kE4M3, 128), 2u * 64 * 129);
  std::vector<std::byte> memory(2 * KvPageBytes(DType::kE4M3, 64));
  const KvPoolView pool{memory.data(), DType::kE4M3, 64, 2, 0};
  EXPECT_EQ(pool.scales(pool.k(1)) - reinterpret_cast<uint8_t*>(pool.k(1)), 64 * 64);
  EXPECT_EQ(reinterpret_cast<uint8_t*>(pool.v(1)) - pool.scales(pool.k(1)), 64);
}

}  // namespace
}  // namespace spl::kernels
