// Activations in e4m3: the rounding of a row, the operations that write such rows, and products that read them.
#include "kernels/quantize/quantize_rows.h"

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/activation/activation.h"
#include "kernels/common/e4m3.h"
#include "kernels/gemm/gemm.h"
#include "kernels/norm/norm.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

struct Rows {
  Rows(int64_t num_rows, int64_t width, int64_t group = 0)
      : codes(static_cast<size_t>(num_rows * width), 0x55),
        scales(static_cast<size_t>(group == 0 ? num_rows : (width + group - 1) / group * E4M3Rows(num_rows)), -7.0f),
        group(group) {}
  Activations act() { return {codes.data(), DType::kE4M3, scales.data(), group}; }
  bool operator==(const Rows&) const = default;
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  int64_t group;
};

// Rows of many magnitudes, one of zeros, one with a single large value.
std::vector<float> SomeRows(Random& random, int64_t num_rows, int64_t width) {
  std::vector<float> x = random.Normals(num_rows * width);
  for (int64_t i = 0; i < num_rows; ++i) {
    const float by = std::ldexp(1.0f, random.Int(-20, 20));
    for (int64_t j = 0; j < width; ++j) x[i * width + j] *= i % 5 == 3 ? 0 : by;
    if (i % 5 == 4) x[i * width + width / 2] = 1e4f * by;
  }
  return x;
}

TEST(QuantizeRows, EveryVariantHasTheReferencesCodes) {
  Random random(61);
  for (const auto& [num_rows, width, group] : std::vector<std::array<int64_t, 3>>{{1, 1, 0},
                                                                                  {7, 16, 0},
                                                                                  {5, 100, 0},
                                                                                  {40, 512, 0},
                                                                                  {3, 4096, 0},
                                                                                  {6, 300, 128},
                                                                                  {8, 512, 128},
                                                                                  {1, 16, 128}}) {
    const std::vector<float> x = SomeRows(random, num_rows, width);
    Rows want(num_rows, width, group), got(num_rows, width, group);
    ExpectOk(ref::QuantizeRows({}, {x.data(), want.act(), num_rows, width}));
    ThreadPool pool(3);
    ExpectOk(cpu::QuantizeRows({.pool = &pool}, {x.data(), got.act(), num_rows, width}));
    EXPECT_EQ(got, want);
    const int64_t columns = group == 0 ? width : group;
    for (int64_t i = 0; i < num_rows; ++i) {
      for (int64_t j = 0; j < width; ++j) {
        float max = 0;
        for (int64_t c = j / columns * columns; c < std::min(width, (j / columns + 1) * columns); ++c)
          max = std::max(max, std::abs(x[i * width + c]));
        const float scale = got.scales[j / columns * E4M3Rows(num_rows) + i];
        ASSERT_EQ(scale, max == 0 ? 1 : max / 448);
        // Half a step of three bits of mantissa, or of the subnormals.
        const float value = x[i * width + j], rounded = kE4M3Values[got.codes[i * width + j]] * scale;
        EXPECT_LE(std::abs(rounded - value), std::max(std::abs(value) / 16, scale * 0x1p-10f) * 1.0001f);
      }
    }
  }
}

TEST(QuantizeRows, WhatIsNoNumberMakesTheRowNaN) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> x(64, 1.0f);
    x[9] = bad;
    Rows want(2, 32), got(2, 32);
    ExpectOk(ref::QuantizeRows({}, {x.data(), want.act(), 2, 32}));
    ExpectOk(cpu::QuantizeRows({}, {x.data(), got.act(), 2, 32}));
    EXPECT_TRUE(std::isnan(kE4M3Values[got.codes[9]] * got.scales[0]));
    EXPECT_TRUE(std::isnan(kE4M3Values[want.codes[9]] * want.scales[0]));
    EXPECT_TRUE(std::equal(got.codes.begin() + 32, got.codes.end(), want.codes.begin() + 32));
    EXPECT_EQ(kE4M3Values[got.codes[40]] * got.scales[1], 1.0f);
  }
}

TEST(QuantizeRows, RefusesWhatItCannotWrite) {
  std::vector<float> x(64);
  Rows rows(4, 16);
  const auto code = [&](QuantizeRowsArgs args) { return cpu::QuantizeRows({}, args).code(); };
  EXPECT_EQ(code({x.data(), {rows.codes.data(), DType::kE4M3}, 4, 16}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({x.data(), {x.data(), DType::kF32}, 4, 16}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({nullptr, rows.act(), 4, 16}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({x.data(), {rows.codes.data(), DType::kE4M3, rows.scales.data(), 64}, 4, 16}),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({x.data(), rows.act(), 4, 0}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({x.data(), rows.act(), 0, 16}), absl::StatusCode::kOk);
}

// Calls an operation with f32 results and with codes, which must be those of the results.
template <typename Operation>
void ExpectCodesOfItsResults(int64_t rows, int64_t width, const Operation& operation) {
  for (const int64_t group : {0, 128}) {
    std::vector<float> plain(static_cast<size_t>(rows * width));
    Rows want(rows, width, group), got(rows, width, group);
    operation(Activations(plain.data()));
    ExpectOk(ref::QuantizeRows({}, {plain.data(), want.act(), rows, width}));
    operation(got.act());
    EXPECT_EQ(got, want) << "group " << group;
  }
}

TEST(QuantizeRows, NormAndActivationWriteTheCodesOfTheirResults) {
  Random random(62);
  const int64_t rows = 9, width = 200;
  const std::vector<float> delta = random.Normals(rows * width), weight = random.Normals(width),
                           gate_up = random.Normals(rows * 2 * width), residual = random.Normals(rows * width);
  const auto norm = [&](auto&& variant, const KernelContext& ctx) {
    ExpectCodesOfItsResults(rows, width, [&](Activations out) {
      std::vector<float> own = residual;
      ExpectOk(variant(ctx, {own.data(), delta.data(), weight.data(), out, rows, width}));
    });
  };
  const auto silu = [&](auto&& variant, const KernelContext& ctx) {
    ExpectCodesOfItsResults(rows, width, [&](Activations out) {
      ExpectOk(variant(ctx, {gate_up.data(), out, rows, width}));
    });
  };
  ThreadPool pool(2);
  for (const CpuIsa isa : MachineIsas()) {
    norm(cpu::RmsNorm, {.pool = &pool, .isa = isa});
    silu(cpu::SiluMul, {.pool = &pool, .isa = isa});
  }
  norm(ref::RmsNorm, {});
  silu(ref::SiluMul, {});
}

TEST(QuantizeRows, ProductsReadCodesAndScales) {
  Random random(63);
  const int64_t rows = 6, in = 320, out = 40;
  const std::vector<float> x = SomeRows(random, rows, in), bias = random.Normals(out);
  std::vector<uint8_t> w(out * in);
  for (uint8_t& code : w) code = FloatToE4M3(random.Normal());
  for (const int64_t group : {0, 128}) {
    Rows codes(rows, in, group);
    ExpectOk(cpu::QuantizeRows({}, {x.data(), codes.act(), rows, in}));
    const int64_t groups = group == 0 ? 1 : (in + group - 1) / group;
    std::vector<float> scales(out * groups);
    for (float& scale : scales) scale = std::abs(random.Normal()) + 0.1f;
    const WeightView view{w.data(), DType::kE4M3, out, in, scales.data(), group};
    std::vector<double> exact(rows * out), magnitude(rows * out);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < out; ++j) {
        for (int64_t c = 0; c < in; ++c) {
          const int64_t g = group == 0 ? 0 : c / group;
          const double part = double{kE4M3Values[codes.codes[i * in + c]]} * codes.scales[g * E4M3Rows(rows) + i] *
                              double{kE4M3Values[w[j * in + c]]} * scales[j * groups + g];
          exact[i * out + j] += part;
          magnitude[i * out + j] += std::abs(part);
        }
        exact[i * out + j] += bias[j];
      }
    }
    // x of groups is rounded to bf16 where such products do that.
    const auto close = [&](const std::vector<float>& y, double tolerance) {
      for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], exact[i], tolerance * (magnitude[i] + 1)) << i;
    };
    std::vector<float> y(rows * out);
    const auto of_ref = ref::PackLinear(view).value();
    ExpectOk(ref::Linear({}, {codes.act(), of_ref.get(), bias.data(), y.data(), rows}));
    close(y, 1e-6);
    for (const GemmCompute compute : {GemmCompute::kAuto, GemmCompute::kF32}) {
      const auto packed = cpu::PackLinear(view, compute).value();
      EXPECT_FALSE(packed->PrefersE4M3(1 << 20));
      ExpectOk(cpu::Linear({.isa = DetectCpuIsa()}, {codes.act(), packed.get(), bias.data(), y.data(), rows}));
      close(y, group == 0 || compute == GemmCompute::kF32 ? 1e-5 : 2e-3);  // sums of 320 products in f32
    }
  }
}

}  // namespace
}  // namespace spl::kernels
