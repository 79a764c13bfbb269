#include "kernels/fill/fill.h"

#include <gmock/gmock.h>

#include <cmath>
#include <vector>

#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

template <typename Op>
std::vector<std::byte> Fill(const Op& op, const KernelContext& ctx, FillRandomArgs a) {
  std::vector<std::byte> out(static_cast<size_t>(a.count) * DTypeBytes(a.dtype) + 8, std::byte{0x5a});
  a.out = out.data();
  const absl::Status s = op(ctx, a);
  EXPECT_TRUE(s.ok()) << s;
  return out;
}

TEST(FillRandom, VariantsAndThreadsAgreeBitwise) {
  TestContext one(DetectCpuIsa(), 1), four(DetectCpuIsa(), 4);
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int32_t exponent : {-16, -11, -9, 0}) {
      FillRandomArgs a{.dtype = dtype, .count = 70001, .stream = Seed(), .first_index = 5, .step_exponent = exponent};
      const auto want = Fill(ref::FillRandom, one.ctx, a);
      EXPECT_EQ(Fill(cpu::FillRandom, one.ctx, a), want);
      EXPECT_EQ(Fill(cpu::FillRandom, four.ctx, a), want);
      EXPECT_EQ(want.back(), std::byte{0x5a});
    }
  }
}

// The numbers are part of what a result "with random weights" means: they may never change.
TEST(FillRandom, KnownValues) {
  // SplitMix64 with state 0 starts 0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4.
  EXPECT_EQ(RandomStep(0, 0),
            (0xe220 * 71 >> 16) + (0xa839 * 71 >> 16) + (0x7b1d * 71 >> 16) + (0xcdaf * 71 >> 16) - 140);
  EXPECT_EQ(RandomStep(0, 1),
            (0x6e78 * 71 >> 16) + (0x9e6a * 71 >> 16) + (0xa1b9 * 71 >> 16) + (0x65f4 * 71 >> 16) - 140);
}

TEST(FillRandom, EveryTypeHoldsTheSameNumbers) {
  TestContext t(DetectCpuIsa());
  FillRandomArgs a{.dtype = DType::kF32, .count = 4096, .stream = Seed()};
  const auto f32 = Fill(cpu::FillRandom, t.ctx, a);
  a.dtype = DType::kBF16;
  const auto b16 = Fill(cpu::FillRandom, t.ctx, a);
  a.dtype = DType::kF16;
  const auto f16 = Fill(cpu::FillRandom, t.ctx, a);
  for (int64_t i = 0; i < a.count; ++i) {
    const float x = reinterpret_cast<const float*>(f32.data())[i];
    ASSERT_EQ(ToFloat(reinterpret_cast<const bf16*>(b16.data())[i]), x) << i;
    ASSERT_EQ(HalfToFloat(reinterpret_cast<const uint16_t*>(f16.data())[i]), x) << i;
  }
}

TEST(FillRandom, PartsMakeTheWhole) {
  TestContext t(DetectCpuIsa());
  const FillRandomArgs a{.count = 1000, .stream = Seed()};
  const auto whole = Fill(cpu::FillRandom, t.ctx, a);
  FillRandomArgs part = a;
  part.count = 300;
  part.first_index = 700;
  const auto tail = Fill(cpu::FillRandom, t.ctx, part);
  EXPECT_TRUE(std::equal(tail.begin(), tail.begin() + 600, whole.begin() + 1400));
}

TEST(FillRandom, SomeColumnsAreThoseOfTheWhole) {
  TestContext t(DetectCpuIsa(), 3);
  constexpr int64_t kRows = 301, kWidth = 37, kBegin = 5, kEnd = 24;
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const FillRandomArgs whole{.dtype = dtype, .count = kRows * kWidth, .stream = Seed(), .first_index = 0};
    FillRandomArgs part = whole;
    part.count = kRows * (kEnd - kBegin);
    part.first_index = kBegin;
    part.row_length = kEnd - kBegin;
    part.row_stride = kWidth;
    const auto all = Fill(cpu::FillRandom, t.ctx, whole);
    const auto columns = Fill(cpu::FillRandom, t.ctx, part);
    EXPECT_EQ(Fill(ref::FillRandom, t.ctx, part), columns);
    const size_t element = DTypeBytes(dtype);
    for (int64_t row = 0; row < kRows; ++row) {
      EXPECT_TRUE(std::equal(columns.begin() + row * part.row_length * element,
                             columns.begin() + (row + 1) * part.row_length * element,
                             all.begin() + (row * kWidth + kBegin) * element))
          << row;
    }
  }
  FillRandomArgs overlap{.count = 4, .row_length = 4, .row_stride = 3};
  std::vector<float> out(4);
  overlap.out = out.data();
  EXPECT_EQ(cpu::FillRandom(t.ctx, overlap).code(), absl::StatusCode::kInvalidArgument);
}

TEST(FillRandom, AboutNormalWithStandardDeviation002AndIndependentStreams) {
  TestContext t(DetectCpuIsa());
  FillRandomArgs a{.dtype = DType::kF32, .count = 1 << 20, .stream = Seed()};
  const auto first = Fill(cpu::FillRandom, t.ctx, a);
  a.stream += 1;
  const auto second = Fill(cpu::FillRandom, t.ctx, a);
  const auto* x = reinterpret_cast<const float*>(first.data());
  const auto* y = reinterpret_cast<const float*>(second.data());
  double sum = 0, squares = 0, fourth = 0, product = 0, neighbours = 0;
  for (int64_t i = 0; i < a.count; ++i) {
    sum += x[i];
    squares += double(x[i]) * x[i];
    fourth += std::pow(double(x[i]), 4);
    product += double(x[i]) * y[i];
    if (i > 0) neighbours += double(x[i]) * x[i - 1];
  }
  const double n = static_cast<double>(a.count), variance = squares / n;
  EXPECT_NEAR(sum / n, 0, 6 * 0.02 / std::sqrt(n));
  EXPECT_NEAR(std::sqrt(variance), 0.02, 2e-4);
  EXPECT_NEAR(fourth / n / (variance * variance), 2.7, 0.05);  // 3 - 1.2 / 4; a normal has 3
  EXPECT_NEAR(product / n / variance, 0, 6 / std::sqrt(n));
  EXPECT_NEAR(neighbours / n / variance, 0, 6 / std::sqrt(n));
}

TEST(FillRandomValidation, RefusesWhatItCannotRun) {
  TestContext t(CpuIsa::kPortable);
  std::vector<float> out(8);
  const FillRandomArgs good{.out = out.data(), .dtype = DType::kF32, .count = 8};
  EXPECT_TRUE(cpu::FillRandom(t.ctx, good).ok());
  const auto refused = [&](const auto& change) {
    FillRandomArgs a = good;
    change(a);
    return cpu::FillRandom(t.ctx, a).code() == absl::StatusCode::kInvalidArgument &&
           ref::FillRandom(t.ctx, a).code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](FillRandomArgs& a) { a.out = nullptr; }));
  EXPECT_TRUE(refused([](FillRandomArgs& a) { a.count = -1; }));
  EXPECT_TRUE(refused([](FillRandomArgs& a) { a.first_index = -1; }));
  EXPECT_TRUE(refused([](FillRandomArgs& a) { a.step_exponent = -17; }));
  EXPECT_TRUE(refused([](FillRandomArgs& a) { a.step_exponent = 1; }));
}

}  // namespace
}  // namespace spl::kernels
