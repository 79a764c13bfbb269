// Four bits a value: what comes back is within half a step of what went in.
#include "services/engine/cache/quantized_kv.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/common/kv_rows.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using kernels::DType;

constexpr int32_t kRows = 2 * 64;

// `values`: K and V [64, head_dim].
std::vector<std::byte> PageOf(const std::vector<float>& values, DType dtype) {
  const auto head_dim = static_cast<int32_t>(values.size()) / kRows;
  std::vector<std::byte> page(kernels::KvPageBytes(dtype, head_dim));
  for (int32_t row = 0; row < kRows; ++row)
    kernels::StoreKvRow(dtype, head_dim, page.data() + row / 64 * page.size() / 2, row % 64,
                        values.data() + row * head_dim);
  return page;
}

std::vector<float> ValuesOf(const std::vector<std::byte>& page, DType dtype, int32_t head_dim) {
  std::vector<float> values(static_cast<size_t>(kRows) * static_cast<size_t>(head_dim));
  for (int32_t row = 0; row < kRows; ++row)
    kernels::LoadKvRow(dtype, head_dim, page.data() + row / 64 * page.size() / 2, row % 64,
                       values.data() + row * head_dim);
  return values;
}

std::vector<std::byte> RoundTrip(const std::vector<std::byte>& page, DType dtype, int32_t head_dim) {
  std::vector<std::byte> quantized(QuantizedPageBytes(head_dim)), back(page.size());
  QuantizePage(page, dtype, head_dim, quantized.data());
  DequantizePage(quantized, dtype, head_dim, back.data());
  return back;
}

TEST(QuantizedKvTest, GroupsDivideTheRow) {
  EXPECT_EQ(QuantizedGroup(128), 64);
  EXPECT_EQ(QuantizedGroup(64), 64);
  EXPECT_EQ(QuantizedGroup(16), 16);
  EXPECT_EQ(QuantizedGroup(80), 40);
  EXPECT_EQ(QuantizedGroup(96), 48);
  EXPECT_EQ(QuantizedGroup(2), 2);
  EXPECT_EQ(QuantizedPageBytes(64), 2u * 64 * (4 + 32));
  EXPECT_EQ(QuantizedPageBytes(128), 2u * 64 * (2 * 4 + 64));
}

// By hand: 0, 1, …, 15 have a step of 1, and code i is value i; in the lower half of a byte stands the row's first
// half.
TEST(QuantizedKvTest, BytesAreThoseOfTheFormat) {
  std::vector<float> values(kRows * 16);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 16) - 3;
  const std::vector<std::byte> page = PageOf(values, DType::kF32);
  std::vector<std::byte> quantized(QuantizedPageBytes(16));
  QuantizePage(page, DType::kF32, 16, quantized.data());
  const uint8_t want[] = {0x40, 0xc0, 0x80, 0x3f, 0x80, 0x91, 0xa2, 0xb3, 0xc4, 0xd5, 0xe6, 0xf7};  // -3, 1, codes
  for (size_t row = 0; row < kRows; ++row) {
    for (size_t i = 0; i < sizeof(want); ++i)
      ASSERT_EQ(std::to_integer<uint8_t>(quantized[row * sizeof(want) + i]), want[i]) << row << ", " << i;
  }
  EXPECT_EQ(RoundTrip(page, DType::kF32, 16), page);
}

// A page of FP8 has the copy that its values have as f32, and comes back as what that copy gives in f32, each row
// rounded once.
TEST(QuantizedKvTest, PagesOfFp8AreWidenedFirst) {
  std::mt19937 random = test::SeededRandom("quantized codes");
  std::normal_distribution<float> normal;
  constexpr int32_t kDim = 64;
  std::vector<float> values(static_cast<size_t>(kRows) * kDim);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = std::ldexp(normal(random), static_cast<int>(i / kDim % 20) - 10);
  const std::vector<std::byte> codes = PageOf(values, DType::kE4M3);
  const std::vector<std::byte> floats = PageOf(ValuesOf(codes, DType::kE4M3, kDim), DType::kF32);
  std::vector<std::byte> of_codes(QuantizedPageBytes(kDim)), of_floats(of_codes.size());
  QuantizePage(codes, DType::kE4M3, kDim, of_codes.data());
  QuantizePage(floats, DType::kF32, kDim, of_floats.data());
  EXPECT_EQ(of_codes, of_floats);
  EXPECT_EQ(RoundTrip(codes, DType::kE4M3, kDim),
            PageOf(ValuesOf(RoundTrip(floats, DType::kF32, kDim), DType::kF32, kDim), DType::kE4M3));
}

TEST(QuantizedKvTest, WhatComesBackIsNear) {
  std::mt19937 random = test::SeededRandom("quantized");
  for (const int32_t head_dim : {16, 64, 80, 128}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kE4M3}) {
      std::vector<float> values(static_cast<size_t>(kRows * head_dim));
      for (size_t row = 0; row < kRows; ++row) {
        // Rows of all sizes, also far from 0, some of one value, some with one that sticks out.
        const float size = std::exp2(static_cast<float>(static_cast<int>(random() % 40) - 20));
        // So far that the rounded minimum is many steps above some values.
        const float middle = row % 11 == 0 ? 3e5f * size : row % 3 == 0 ? 10 * size : 0;
        std::normal_distribution<float> normal(middle, row % 7 == 0 ? 0 : size);
        for (int32_t i = 0; i < head_dim; ++i) values[row * static_cast<size_t>(head_dim) + i] = normal(random);
        if (row % 5 == 0) values[row * static_cast<size_t>(head_dim) + random() % head_dim] *= 30;
      }
      const std::vector<std::byte> page = PageOf(values, dtype);
      values = ValuesOf(page, dtype, head_dim);
      const std::vector<float> back = ValuesOf(RoundTrip(page, dtype, head_dim), dtype, head_dim);
      const auto group = static_cast<size_t>(QuantizedGroup(head_dim));
      for (size_t begin = 0; begin < values.size(); begin += group) {
        const auto [low, high] = std::minmax_element(values.begin() + static_cast<std::ptrdiff_t>(begin),
                                                     values.begin() + static_cast<std::ptrdiff_t>(begin + group));
        const float most = std::max(std::abs(*low), std::abs(*high));
        // Half a step; minimum, step (15 times) and result rounded to bf16, or the result to three bits of mantissa.
        const float bound = (*high - *low) / 15 / 2 + most * (dtype == DType::kE4M3 ? 0.08f : 3.0f / 256);
        for (size_t i = begin; i < begin + group; ++i)
          ASSERT_LE(std::abs(back[i] - values[i]), bound) << head_dim << ", " << DTypeName(dtype) << ", " << i;
      }
    }
  }
}

// A damaged payload that no checksum shows is some page.
TEST(QuantizedKvTest, AnyBytesGiveAPage) {
  std::mt19937 random = test::SeededRandom("any bytes");
  for (int round = 0; round < 20; ++round) {
    std::vector<std::byte> quantized(QuantizedPageBytes(64)), page(kRows * 64 * 2);
    for (std::byte& byte : quantized) byte = std::byte(random() & 255);
    DequantizePage(quantized, DType::kBF16, 64, page.data());
    DequantizePage(quantized, DType::kE4M3, 64, page.data());
  }
}

}  // namespace
}  // namespace spl::engine
