// Four bits a value: what comes back is within half a step of what went in.
#include "services/engine/cache/quantized_kv.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using kernels::DType;

constexpr int32_t kRows = 2 * 64;

std::vector<std::byte> PageOf(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> page(values.size() * kernels::DTypeBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const kernels::bf16 half = kernels::ToBf16(values[i]);
    if (dtype == DType::kF32) {
      std::memcpy(page.data() + 4 * i, &values[i], 4);
    } else {
      std::memcpy(page.data() + 2 * i, &half, 2);
    }
  }
  return page;
}

std::vector<float> ValuesOf(const std::vector<std::byte>& page, DType dtype) {
  std::vector<float> values(page.size() / kernels::DTypeBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    kernels::bf16 half{};
    if (dtype == DType::kF32) {
      std::memcpy(&values[i], page.data() + 4 * i, 4);
    } else {
      std::memcpy(&half, page.data() + 2 * i, 2);
      values[i] = kernels::ToFloat(half);
    }
  }
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

TEST(QuantizedKvTest, WhatComesBackIsNear) {
  std::mt19937 random = test::SeededRandom("quantized");
  for (const int32_t head_dim : {16, 64, 80, 128}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
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
      values = ValuesOf(page, dtype);
      const std::vector<float> back = ValuesOf(RoundTrip(page, dtype, head_dim), dtype);
      const auto group = static_cast<size_t>(QuantizedGroup(head_dim));
      for (size_t begin = 0; begin < values.size(); begin += group) {
        const auto [low, high] = std::minmax_element(values.begin() + static_cast<std::ptrdiff_t>(begin),
                                                     values.begin() + static_cast<std::ptrdiff_t>(begin + group));
        const float most = std::max(std::abs(*low), std::abs(*high));
        // Half a step; minimum, step (15 times) and result rounded to bf16.
        const float bound = (*high - *low) / 15 / 2 + most * (3.0f / 256);
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
  }
}

}  // namespace
}  // namespace spl::engine
