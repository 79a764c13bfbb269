// Rows of pages by their bytes, and the vector code of rows in e4m3 against e4m3_rows.h bit for bit.
#include "kernels/common/kv_rows.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/common/e4m3_rows_isa.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr int32_t kDim = 24;

TEST(KvRowsTest, ARowOfCodesHasItsScaleBehindAllRows) {
  Random random(1);
  const std::vector<float> row = random.Normals(kDim);
  std::vector<std::byte> half(HalfPageBytes(DType::kE4M3, kDim), std::byte{0x5a});
  StoreKvRow(DType::kE4M3, kDim, half.data(), 7, row.data());
  std::vector<uint8_t> codes(kDim);
  const uint8_t scale = QuantizeRow(row.data(), kDim, codes.data());
  for (size_t i = 0; i < half.size(); ++i) {
    const auto byte = static_cast<uint8_t>(half[i]);
    if (i >= 7 * kDim && i < 8 * kDim) {
      EXPECT_EQ(byte, codes[i - 7 * kDim]);
    } else {
      EXPECT_EQ(byte, i == 64 * kDim + 7 ? scale : 0x5a) << i;
    }
  }
  std::vector<float> back(kDim);
  LoadKvRow(DType::kE4M3, kDim, half.data(), 7, back.data());
  for (int32_t c = 0; c < kDim; ++c) {
    EXPECT_EQ(back[c], E4M3ToFloat(codes[c]) * std::ldexp(1.0f, scale - 127));
    EXPECT_EQ(KvElement(DType::kE4M3, kDim, half.data(), 7, c), back[c]);
  }
}

TEST(KvRowsTest, RowsAreCopiedWithTheirScales) {
  Random random(2);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kE4M3}) {
    std::vector<std::byte> from(HalfPageBytes(dtype, kDim)), to(from.size(), std::byte{0x5a});
    std::vector<float> row(kDim), got(kDim);
    for (int32_t slot = 0; slot < kPageTokens; ++slot) {
      for (float& x : row) x = std::ldexp(random.Normal(), slot - 30);
      StoreKvRow(dtype, kDim, from.data(), slot, row.data());
    }
    const std::vector<std::byte> before = to;
    CopyKvRows(dtype, kDim, from.data(), 10, to.data(), 50, 14);
    for (int32_t slot = 0; slot < kPageTokens; ++slot) {
      const bool copied = slot >= 50;
      LoadKvRow(dtype, kDim, copied ? from.data() : before.data(), copied ? slot - 40 : slot, row.data());
      LoadKvRow(dtype, kDim, to.data(), slot, got.data());
      EXPECT_TRUE(BitwiseEqual(got, row)) << DTypeName(dtype) << ", slot " << slot;
    }
  }
}

class E4M3RowsIsa : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(E4M3RowsIsa, EqualTheDefinitionBitForBit) {
  Random random(3);
  const cpu::E4M3RowKernels& kernels = cpu::E4M3RowKernelsFor(GetParam());
  constexpr int32_t kRows = 300;
  for (const int32_t width : {1, 7, 8, 24, 64, 104, 128, 256}) {
    std::vector<float> rows(static_cast<size_t>(kRows) * width);
    for (size_t i = 0; i < rows.size(); ++i) {
      const int32_t kind = static_cast<int32_t>(i) / width % 10;
      // Any bits, infinities and NaN among them; rows of one size; rows of many; halves between two codes.
      rows[i] = kind == 0   ? std::bit_cast<float>(random.Int(INT32_MIN, INT32_MAX))
                : kind < 4  ? std::ldexp(random.Normal(), random.Int(-130, 30))
                : kind == 4 ? static_cast<float>(random.Int(-900, 900)) / 2
                            : random.Normal() * std::exp2(static_cast<float>(i / width % 40) - 20);
    }
    rows[static_cast<size_t>(width) * 20] = std::numeric_limits<float>::infinity();
    rows[static_cast<size_t>(width) * 21] = std::numeric_limits<float>::quiet_NaN();
    std::vector<uint8_t> codes(rows.size()), scales(kRows), want(width);
    kernels.quantize(rows.data(), kRows, width, codes.data(), scales.data());
    std::vector<float> back(rows.size()), want_back(width);
    kernels.widen(codes.data(), scales.data(), kRows, width, back.data());
    for (int32_t r = 0; r < kRows; ++r) {
      const size_t at = static_cast<size_t>(r) * width;
      ASSERT_EQ(scales[r], QuantizeRow(&rows[at], width, want.data())) << "width " << width << ", row " << r;
      ASSERT_TRUE(std::equal(want.begin(), want.end(), &codes[at])) << "width " << width << ", row " << r;
      WidenRow(want.data(), scales[r], width, want_back.data());
      for (int32_t c = 0; c < width; ++c) {
        if (std::isnan(want_back[c])) {
          ASSERT_TRUE(std::isnan(back[at + c])) << "row " << r;
        } else {
          ASSERT_EQ(back[at + c], want_back[c]) << "row " << r;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, E4M3RowsIsa, ::testing::ValuesIn(MachineIsas()), IsaParam);

}  // namespace
}  // namespace spl::kernels
