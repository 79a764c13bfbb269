// Products with int4 weights on a CUDA device against a double-precision sum on the host, and against themselves bit by
// bit for other numbers of rows. Needs a CUDA device; skips without one.
//
// NaN stands where nothing may be read (rows of x past the last) or written (rows of y past the last).
#include "kernels/gemm/int4_gemm_cuda.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/common/dtype.h"
#include "kernels/common/e4m3.h"
#include "kernels/gemm/fp8_gemm_cuda.h"
#include "tests/kernels/support/cuda_test_util.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels::cuda {
namespace {

using testing::DeviceBuffer;
using testing::Random;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kRowsMax = 300;
constexpr size_t kWorkspace = size_t{8} << 20;

struct Product {
  std::string name;
  std::function<cudaError_t(const Int4GemmArgs&, cudaStream_t)> run;
  bool orders = true;      // serves column orders
  bool one_order = false;  // rows are bitwise independent for all numbers of rows
  bool on_hopper = false;  // only there, with whole rows or multiples of 128 columns as scale groups
};

struct Problem {
  Problem(Random& random, int64_t out, int64_t in, int64_t group, bool ordered)
      : out(out), in(in), group(group), groups(group == 0 ? 1 : (in + group - 1) / group), bias(random.Normals(out)) {
    for (const float value : random.Normals(kRowsMax * in)) x.push_back(ToBf16(value).bits);
    for (int64_t i = 0; i < out * in / 2; ++i) codes.push_back(static_cast<uint8_t>(random.Int(0, 255)));
    for (int64_t i = 0; i < out * groups; ++i) {
      scales.push_back(0.01f * (1 + std::fabs(random.Normal())));
      zeros.push_back(static_cast<uint8_t>(random.Int(0, 16)));
    }
    if (!ordered) return;
    order.resize(static_cast<size_t>(in));
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = in - 1; i > 0; --i) std::swap(order[i], order[random.Int(0, static_cast<int32_t>(i))]);
  }

  template <typename T>  // float or uint16_t, the bits of bf16
  std::vector<T> Run(const Product& product, int64_t first, int64_t rows, bool with_bias, T unwritten) const {
    std::vector<uint16_t> part(x.begin() + first * in, x.begin() + (first + rows) * in);
    part.resize(static_cast<size_t>(in * (rows + 64)), 0x7fff);
    const DeviceBuffer<uint16_t> x_device(part);
    const DeviceBuffer<uint8_t> w_device(codes), zeros_device(zeros), workspace(kWorkspace);
    CHECK_CUDA(ArrangeInt4Codes(w_device.get(), out * in / 2, nullptr));
    const DeviceBuffer<float> scales_device(scales), bias_device(bias);
    const DeviceBuffer<int32_t> order_device(order);
    const DeviceBuffer<T> y(std::vector<T>(static_cast<size_t>((rows + 1) * out), unwritten));
    CHECK_CUDA(product.run({.x = x_device.get(),
                            .codes = w_device.get(),
                            .scales = scales_device.get(),
                            .zeros = zeros_device.get(),
                            .scale_group = group,
                            .column_order = order.empty() ? nullptr : order_device.get(),
                            .bias = with_bias ? bias_device.get() : nullptr,
                            .y = y.get(),
                            .y_dtype = sizeof(T) == 4 ? DType::kF32 : DType::kBF16,
                            .num_rows = rows,
                            .out_features = out,
                            .in_features = in,
                            .workspace = workspace.get(),
                            .workspace_bytes = kWorkspace},
                           nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    std::vector<T> values = y.Read();
    for (int64_t j = 0; j < out; ++j)
      EXPECT_EQ(std::memcmp(&values[rows * out + j], &unwritten, sizeof(T)), 0) << "written past the last row";
    values.resize(static_cast<size_t>(rows * out));
    return values;
  }
  std::vector<float> Multiply(const Product& product, int64_t first, int64_t rows, bool with_bias) const {
    return Run<float>(product, first, rows, with_bias, kNaN);
  }

  // Largest error of every step-th element in units of the f32 rounding of a sum of that size.
  double WorstError(const std::vector<float>& y, int64_t rows, bool with_bias) const {
    const int64_t step = std::max<int64_t>(1, rows * out * in / 4'000'000);
    double worst = 0;
    for (int64_t at = 0; at < rows * out; at += step) {
      const int64_t r = at / out, j = at % out;
      double sum = with_bias ? bias[j] : 0, size = std::abs(sum);
      for (int64_t k = 0; k < in; ++k) {
        const uint8_t byte = codes[(j * in + k) / 2];
        const int64_t of_group = j * groups + (group == 0 ? 0 : k / group);
        const int code = k % 2 == 0 ? byte % 16 : byte / 16;
        const int64_t column = order.empty() ? k : order[k];
        const double term =
            double{ToFloat(bf16{x[r * in + column]})} * (code - int{zeros[of_group]}) * scales[of_group];
        sum += term;
        size += std::abs(term);
      }
      const double error = std::abs(y[at] - sum) / (size * 0x1p-24);
      worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
    }
    return worst;
  }
  std::string Name() const {
    return std::to_string(out) + " x " + std::to_string(in) + ", groups of " + std::to_string(group) +
           (order.empty() ? "" : ", ordered");
  }

  int64_t out, in, group, groups;
  std::vector<uint16_t> x;
  std::vector<uint8_t> codes, zeros;
  std::vector<float> scales, bias;
  std::vector<int32_t> order;
};

// Features, columns: odd sizes, tiles that end in the middle, fewer chunks than warps, several slices of features.
const std::vector<std::pair<int64_t, int64_t>> kShapes = {
    {1, 32}, {16, 128}, {40, 160}, {17, 544}, {384, 1024}, {131, 4128}, {1024, 4096}, {6144, 1024}, {700, 14336}};

class Int4GemmCudaTest : public ::testing::TestWithParam<Product> {
 protected:
  void SetUp() override {
    if (!testing::HasGpu()) GTEST_SKIP() << "no CUDA device";
    int major = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (GetParam().on_hopper && major != 9) GTEST_SKIP() << "a kernel for Hopper only";
  }
  std::vector<Problem> Problems(Random& random) {
    std::vector<Problem> problems;
    for (const auto& [out, in] : kShapes) {
      for (const int64_t group : {0, 32, 64, 128, 256}) {
        if (GetParam().on_hopper && group % 128 != 0) continue;
        problems.emplace_back(random, out, in, group, GetParam().orders && random.Int(0, 3) == 0);
      }
    }
    return problems;
  }
};

TEST_P(Int4GemmCudaTest, IsTheProduct) {
  Random random(80);
  for (const Problem& p : Problems(random)) {
    for (const int64_t rows : {1, 3, 8, 9, 16, 17, 24, 25, 32, 33, 63, 65, 130, 300}) {
      const bool with_bias = p.out % 2 == 0;
      // Sums in f32 in any order stay far below the worst case of `in` roundings; tensor cores truncate, about two.
      EXPECT_LT(p.WorstError(p.Multiply(GetParam(), 0, rows, with_bias), rows, with_bias),
                4 + 2 * std::sqrt(static_cast<double>(p.in)))
          << p.Name() << ", " << rows << " rows";
    }
  }
}

TEST_P(Int4GemmCudaTest, RowsDoNotDependOnTheOtherRows) {
  Random random(81);
  for (const Problem& p : Problems(random)) {
    // Int4Gemm without one_order: among the numbers of rows that stream the weight, and are not for SkinnyInt4GemmSm90.
    const int64_t most = GetParam().one_order ? kRowsMax : kMaxStreamedInt4Rows;
    const std::vector<float> all = p.Multiply(GetParam(), 0, most, true);
    for (const int64_t rows : {1, 7, 8, 15, 16, 23, 32, 40, 64, 100, 128, 257}) {
      if (rows > most || (!GetParam().one_order && rows <= 8)) continue;
      const int64_t first = random.Int(0, static_cast<int32_t>(most - rows));
      EXPECT_TRUE(testing::BitwiseEqual(p.Multiply(GetParam(), first, rows, true),
                                        std::span(all).subspan(first * p.out, rows * p.out)))
          << p.Name() << ", " << rows << " rows from " << first;
    }
  }
}

TEST_P(Int4GemmCudaTest, ABf16ResultIsTheF32OneRounded) {
  Random random(82);
  for (const Problem& p : Problems(random)) {
    for (const int64_t rows : {1, 31, 64, 129, 300}) {
      const std::vector<float> wide = p.Multiply(GetParam(), 0, rows, true);
      const std::vector<uint16_t> narrow = p.Run<uint16_t>(GetParam(), 0, rows, true, 0x7fff);
      for (size_t i = 0; i < wide.size(); ++i) {
        ASSERT_EQ(narrow[i], ToBf16(wide[i]).bits) << p.Name() << ", " << rows << " rows, element " << i;
      }
    }
  }
}

// Blocks that have many tiles in turn, and long rows, as in an 8B model: the scales of a tile must have arrived when it
// begins, also while memory is busy.
TEST_P(Int4GemmCudaTest, BlocksWithManyTilesRepeatTheirBits) {
  Random random(84);
  for (const auto& [out, in] : {std::pair<int64_t, int64_t>{28672, 4096}, {4096, 14336}}) {
    const Problem p(random, out, in, 128, false);
    for (const int64_t rows : {1, 2, 8}) {
      const std::vector<float> first = p.Multiply(GetParam(), 0, rows, true);
      EXPECT_LT(p.WorstError(first, rows, true), 4 + 2 * std::sqrt(static_cast<double>(in))) << p.Name();
      for (int i = 0; i < 4; ++i)
        EXPECT_TRUE(testing::BitwiseEqual(p.Multiply(GetParam(), 0, rows, true), first)) << p.Name() << ", " << rows;
    }
  }
}

// A row with an infinity or a NaN gives nothing finite, and the others what they give without it.
TEST_P(Int4GemmCudaTest, WhatIsNotFiniteStaysInItsRow) {
  Random random(83);
  constexpr int64_t kRows = 4;
  Problem p(random, 40, 384, 128, false);
  const std::vector<float> finite = p.Multiply(GetParam(), 0, kRows, true);
  p.x[1 * p.in + 200] = 0xff80;  // -inf
  p.x[2 * p.in + 383] = 0x7fc0;  // NaN
  const std::vector<float> y = p.Multiply(GetParam(), 0, kRows, true);
  for (int64_t row = 0; row < kRows; ++row) {
    const auto first = row * p.out;
    if (row == 0 || row == 3) {
      EXPECT_TRUE(testing::BitwiseEqual(std::span(y).subspan(first, p.out), std::span(finite).subspan(first, p.out)));
      continue;
    }
    for (int64_t i = first; i < first + p.out; ++i) EXPECT_FALSE(std::isfinite(y[i])) << i;
  }
}

TEST_P(Int4GemmCudaTest, RefusesWhatItDoesNotServe) {
  const DeviceBuffer<uint16_t> x(64 * 64);
  const DeviceBuffer<uint8_t> w(64 * 64), zeros(64 * 64);
  const DeviceBuffer<float> f(64 * 64);
  Int4GemmArgs args{.x = x.get(),
                    .codes = w.get(),
                    .scales = f.get(),
                    .zeros = zeros.get(),
                    .y = f.get(),
                    .num_rows = 4,
                    .out_features = 8,
                    .in_features = 48};
  EXPECT_EQ(GetParam().run(args, nullptr), cudaErrorNotSupported);
  args.in_features = 64;
  args.scale_group = 96;
  EXPECT_EQ(GetParam().run(args, nullptr), cudaErrorNotSupported);
}

INSTANTIATE_TEST_SUITE_P(
    Kernels, Int4GemmCudaTest,
    ::testing::Values(
        Product{.name = "Skinny", .run = &SkinnyInt4Gemm, .orders = false, .one_order = true},
        Product{
            .name = "SkinnySm90", .run = &SkinnyInt4GemmSm90, .orders = false, .one_order = true, .on_hopper = true},
        Product{
            .name = "DigitsSm90", .run = &Int4DigitsGemmSm90, .orders = false, .one_order = true, .on_hopper = true},
        Product{.name = "Chosen",
                .run = [](const Int4GemmArgs& a, cudaStream_t stream) { return Int4Gemm(a, false, stream); }},
        Product{.name = "OneOrder",
                .run = [](const Int4GemmArgs& a, cudaStream_t stream) { return Int4Gemm(a, true, stream); },
                .one_order = true}),
    [](const ::testing::TestParamInfo<Product>& info) { return info.param.name; });

// Every code and zero point, before any sum.
TEST(ExpandInt4Cuda, MakesTheArrangedCodesOfFp8) {
  if (!testing::HasGpu()) GTEST_SKIP() << "no CUDA device";
  constexpr int64_t kOut = 17, kIn = 64, kGroup = 32;
  std::vector<uint8_t> codes, zeros, expected;
  for (int64_t i = 0; i < kOut * kIn / 2; ++i) codes.push_back(static_cast<uint8_t>(i * 37 + i / 256));
  for (int64_t i = 0; i < kOut * kIn / kGroup; ++i) zeros.push_back(static_cast<uint8_t>(i % 17));
  for (int64_t i = 0; i < kOut * kIn; ++i) {
    const int code = i % 2 == 0 ? codes[i / 2] % 16 : codes[i / 2] / 16;
    expected.push_back(FloatToE4M3(static_cast<float>(code - zeros[i / kGroup])));
  }
  const DeviceBuffer<uint8_t> from(codes), zeros_device(zeros), want(expected), got(expected.size());
  CHECK_CUDA(ArrangeInt4Codes(from.get(), kOut * kIn / 2, nullptr));
  CHECK_CUDA(ArrangeFp8Codes(want.get(), kOut * kIn, nullptr));
  const Int4GemmArgs args{.codes = from.get(),
                          .zeros = zeros_device.get(),
                          .scale_group = kGroup,
                          .out_features = kOut,
                          .in_features = kIn};
  CHECK_CUDA(ExpandInt4Codes(args, 0, kOut, got.get(), nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(got.Read(), want.Read());
}

}  // namespace
}  // namespace spl::kernels::cuda
