// Both products with FP8 weights on a CUDA device against a double-precision sum on the host, and against themselves
// bit by bit for other numbers of rows. Needs a CUDA device; skips without one.
//
// NaN stands where nothing may be read (rows of x past the last, the end of W) or written (rows of y past the last).
#include "kernels/gemm/fp8_gemm_cuda.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/common/dtype.h"
#include "kernels/common/e4m3.h"
#include "tests/kernels/support/cuda_test_util.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels::cuda {
namespace {

using testing::DeviceBuffer;
using testing::Random;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kRowsMax = 600;

struct Product {
  std::string name;
  std::function<cudaError_t(const Fp8GemmArgs&, cudaStream_t)> run;
  bool groups_of_128 = true, needs_sm90 = false;
};

Product Tiling(int rows, int split) {
  return {.name = "Sm90x" + std::to_string(rows) + "x" + std::to_string(split),
          .run =
              [=](const Fp8GemmArgs& a, cudaStream_t stream) {
                return TiledFp8GemmSm90(a, {rows, split}, stream);
              },
          .groups_of_128 = rows <= 128,
          .needs_sm90 = true};
}

struct Problem {
  Problem(Random& random, int64_t out, int64_t in, int64_t group)
      : out(out), in(in), group(group), groups(group == 0 ? 1 : (in + group - 1) / group), bias(random.Normals(out)) {
    for (const float value : random.Normals(kRowsMax * in)) x.push_back(ToBf16(value).bits);
    for (int64_t i = 0; i < out * in; ++i) {
      uint8_t code = static_cast<uint8_t>(random.Int(0, 255));
      while (IsE4M3Nan(code)) code = static_cast<uint8_t>(random.Int(0, 255));
      codes.push_back(code);
    }
    for (int64_t i = 0; i < out * groups; ++i) scales.push_back(0.01f * (1 + std::fabs(random.Normal())));
  }

  std::vector<float> Multiply(const Product& product, int64_t first, int64_t rows, bool with_bias) const {
    return Run<float>(product, first, rows, with_bias, kNaN);
  }

  template <typename T>  // float or uint16_t, the bits of bf16
  std::vector<T> Run(const Product& product, int64_t first, int64_t rows, bool with_bias, T unwritten) const {
    std::vector<uint16_t> part(x.begin() + first * in, x.begin() + (first + rows) * in);
    part.resize(static_cast<size_t>(in * (rows + 64)), 0x7fff);
    std::vector<uint8_t> padded = codes;
    padded.resize(codes.size() + 4096, 0x7f);
    const DeviceBuffer<uint16_t> x_device(part);
    const DeviceBuffer<uint8_t> w_device(padded);
    CHECK_CUDA(ArrangeFp8Codes(w_device.get(), out * in, nullptr));
    const DeviceBuffer<float> scales_device(scales), bias_device(bias);
    const DeviceBuffer<T> y(std::vector<T>(static_cast<size_t>((rows + 1) * out), unwritten));
    CHECK_CUDA(product.run({.x = x_device.get(),
                            .codes = w_device.get(),
                            .scales = scales_device.get(),
                            .scale_group = group,
                            .bias = with_bias ? bias_device.get() : nullptr,
                            .y = y.get(),
                            .y_dtype = sizeof(T) == 4 ? DType::kF32 : DType::kBF16,
                            .num_rows = rows,
                            .out_features = out,
                            .in_features = in},
                           nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    std::vector<T> values = y.Read();
    for (int64_t j = 0; j < out; ++j)
      EXPECT_EQ(std::memcmp(&values[rows * out + j], &unwritten, sizeof(T)), 0) << "written past the last row";
    values.resize(static_cast<size_t>(rows * out));
    return values;
  }

  // Largest error of every step-th element in units of the f32 rounding of a sum of that size.
  double WorstError(const std::vector<float>& y, int64_t rows, bool with_bias) const {
    const int64_t step = std::max<int64_t>(1, rows * out * in / 4'000'000);
    double worst = 0;
    for (int64_t at = 0; at < rows * out; at += step) {
      const int64_t r = at / out, j = at % out;
      double sum = with_bias ? bias[j] : 0, size = std::abs(sum);
      for (int64_t k = 0; k < in; ++k) {
        const double term = double{ToFloat(bf16{x[r * in + k]})} * E4M3ToFloat(codes[j * in + k]) *
                            scales[j * groups + (group == 0 ? 0 : k / group)];
        sum += term;
        size += std::abs(term);
      }
      const double error = std::abs(y[at] - sum) / (size * 0x1p-24);
      worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
    }
    return worst;
  }

  int64_t out, in, group, groups;
  std::vector<uint16_t> x;
  std::vector<uint8_t> codes;
  std::vector<float> scales, bias;
};

// Features, columns: odd sizes, tiles that end in the middle, fewer chunks than warps, shapes of an 8B model.
const std::vector<std::pair<int64_t, int64_t>> kShapes = {
    {1, 16}, {16, 128}, {40, 144}, {17, 528}, {384, 1024}, {131, 4112}, {768, 512}, {1024, 4096}, {6144, 1024}};

class Fp8GemmCudaTest : public ::testing::TestWithParam<Product> {
 protected:
  void SetUp() override {
    if (!testing::HasGpu()) GTEST_SKIP() << "no CUDA device";
    int major = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (GetParam().needs_sm90 && major != 9) GTEST_SKIP() << "a kernel for Hopper only";
  }
};

TEST_P(Fp8GemmCudaTest, IsTheProduct) {
  Random random(60);
  for (const auto& [out, in] : kShapes) {
    for (const int64_t group : {0, GetParam().groups_of_128 ? kFp8Group : 0}) {
      const Problem p(random, out, in, group);
      for (const int64_t rows : {1, 3, 8, 9, 16, 17, 24, 25, 32, 33, 63, 65, 130, 300, 600}) {
        // Sums in f32 in any order stay far below the worst case of `in` roundings; tensor cores truncate, about two.
        EXPECT_LT(p.WorstError(p.Multiply(GetParam(), 0, rows, out % 2 == 0), rows, out % 2 == 0),
                  4 + 2 * std::sqrt(static_cast<double>(in)))
            << out << " x " << in << ", groups of " << group << ", " << rows << " rows";
      }
    }
  }
}

TEST_P(Fp8GemmCudaTest, RowsDoNotDependOnTheOtherRows) {
  Random random(61);
  for (const auto& [out, in] : kShapes) {
    const Problem p(random, out, in, random.Int(0, 1) * (GetParam().groups_of_128 ? kFp8Group : 0));
    const std::vector<float> all = p.Multiply(GetParam(), 0, kRowsMax, true);
    for (const int64_t rows : {1, 7, 8, 15, 16, 23, 32, 40, 64, 100, 128, 257}) {
      const int64_t first = random.Int(0, static_cast<int32_t>(kRowsMax - rows));
      EXPECT_TRUE(testing::BitwiseEqual(p.Multiply(GetParam(), first, rows, true),
                                        std::span(all).subspan(first * out, rows * out)))
          << out << " x " << in << ", groups of " << p.group << ", " << rows << " rows from " << first;
    }
  }
}

TEST_P(Fp8GemmCudaTest, ABf16ResultIsTheF32OneRounded) {
  Random random(62);
  for (const auto& [out, in] : kShapes) {
    const Problem p(random, out, in, random.Int(0, 1) * (GetParam().groups_of_128 ? kFp8Group : 0));
    for (const int64_t rows : {1, 31, 64, 129, 300}) {
      const std::vector<float> wide = p.Multiply(GetParam(), 0, rows, true);
      const std::vector<uint16_t> narrow = p.Run<uint16_t>(GetParam(), 0, rows, true, 0x7fff);
      for (size_t i = 0; i < wide.size(); ++i) {
        ASSERT_EQ(narrow[i], ToBf16(wide[i]).bits) << out << " x " << in << ", " << rows << " rows, element " << i;
      }
    }
  }
}

// Tiles that share no columns give the same bits, whatever their rows: the choice by the number of rows changes
// nothing.
TEST(Fp8GemmCuda, TilesOfOneOrderAgree) {
  if (!testing::HasGpu()) GTEST_SKIP() << "no CUDA device";
  int major = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major != 9) GTEST_SKIP() << "a kernel for Hopper only";
  Random random(63);
  for (const auto& [out, in] : kShapes) {
    const Problem p(random, out, in, 0);
    const std::vector<float> expected = p.Multiply(Tiling(256, 0), 0, 300, true);
    for (const int rows : {64, 128}) {
      EXPECT_TRUE(testing::BitwiseEqual(p.Multiply(Tiling(rows, 0), 0, 300, true), expected)) << out << " x " << in;
    }
  }
}

// Blocks that have many tiles in turn, as in an 8B model: the scales of a tile must have arrived when it begins, also
// while memory is busy.
TEST(Fp8GemmCuda, BlocksWithManyTilesRepeatTheirBits) {
  if (!testing::HasGpu()) GTEST_SKIP() << "no CUDA device";
  Random random(64);
  constexpr int64_t kOut = 28672, kIn = 4096;
  const Problem p(random, kOut, kIn, kFp8Group);
  const Product product{"Fp8Gemm", &Fp8Gemm, true, false};
  for (const int64_t rows : {1, 2, 8, 17}) {
    const std::vector<float> first = p.Multiply(product, 0, rows, true);
    EXPECT_LT(p.WorstError(first, rows, true), 4 + 2 * std::sqrt(static_cast<double>(kIn))) << rows << " rows";
    for (int i = 0; i < 4; ++i)
      EXPECT_TRUE(testing::BitwiseEqual(p.Multiply(product, 0, rows, true), first)) << rows << " rows";
  }
}

TEST_P(Fp8GemmCudaTest, RefusesWhatItDoesNotServe) {
  const DeviceBuffer<uint16_t> x(64 * 32);
  const DeviceBuffer<uint8_t> w(64 * 32);
  const DeviceBuffer<float> f(64 * 64);
  Fp8GemmArgs args{.x = x.get(),
                   .codes = w.get(),
                   .scales = f.get(),
                   .y = f.get(),
                   .num_rows = 4,
                   .out_features = 8,
                   .in_features = 24};
  EXPECT_EQ(GetParam().run(args, nullptr), cudaErrorNotSupported);
  args.in_features = 32;
  args.scale_group = 48;
  EXPECT_EQ(GetParam().run(args, nullptr), cudaErrorNotSupported);
  args.scale_group = 0;
  args.codes = w.get() + 1;
  EXPECT_EQ(GetParam().run(args, nullptr), cudaErrorNotSupported);
}

INSTANTIATE_TEST_SUITE_P(Kernels, Fp8GemmCudaTest,
                         ::testing::Values(Product{"Skinny", &SkinnyFp8Gemm},
                                           Product{"SkinnySm90", &SkinnyFp8GemmSm90, true, true},
                                           Product{"Sm80", &TiledFp8GemmSm80}, Tiling(64, 0), Tiling(128, 0),
                                           Tiling(256, 0), Tiling(16, 1), Tiling(16, 8), Tiling(32, 2), Tiling(32, 4),
                                           Tiling(64, 1), Tiling(64, 8), Tiling(128, 2), Tiling(128, 4)),
                         [](const ::testing::TestParamInfo<Product>& info) { return info.param.name; });

}  // namespace
}  // namespace spl::kernels::cuda
