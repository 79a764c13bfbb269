// Products with FP8 weights: the codes, and every CPU variant of this machine against the reference for random shapes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/common/e4m3.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_fp8_cpu.h"
#include "kernels/gemm/gemm_fp8_isa.h"
#include "kernels/moe/grouped_linear.h"
#include "tests/kernels/gemm/scaled_linear_variant.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

TEST(E4M3, HasTheValuesOfItsDefinition) {
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float got = E4M3ToFloat(static_cast<uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(got));
      EXPECT_TRUE(IsE4M3Nan(static_cast<uint8_t>(code)));
      continue;
    }
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(1.0 + mantissa / 8.0, exponent - 7);
    EXPECT_EQ(got, code < 128 ? magnitude : -magnitude) << code;
    EXPECT_EQ(std::signbit(got), code >= 128);
    EXPECT_EQ(FloatToE4M3(got), code);
    EXPECT_EQ(ToFloat(ToBf16(got)), got);
  }
}

// The nearest code; of two, the one with an even mantissa.
TEST(E4M3, RoundsToTheNearestValueAndToEvenCodes) {
  Random random(50);
  std::vector<float> values = {0.0f,     448.0f,   463.9f,    464.0f,   480.0f,    1e30f,
                               INFINITY, 0x1p-10f, 0x1.8p-9f, 0x1p-11f, 0x1.fp-7f, 0x1.efp-7f};
  for (int code = 0; code + 1 < 0x7f; ++code) values.push_back((kE4M3Values[code] + kE4M3Values[code + 1]) / 2);
  for (int i = 0; i < 20000; ++i) values.push_back(std::ldexp(random.Normal(), random.Int(-12, 8)));
  for (float x : values) {
    for (float signed_x : {x, -x}) {
      int best = 0;
      const float magnitude = std::min(std::fabs(signed_x), kE4M3Max);
      for (int code = 1; code < 0x7f; ++code) {
        const float to_best = std::fabs(kE4M3Values[best] - magnitude),
                    to_code = std::fabs(kE4M3Values[code] - magnitude);
        if (to_code < to_best || (to_code == to_best && code % 2 == 0)) best = code;
      }
      EXPECT_EQ(FloatToE4M3(signed_x), best | (std::signbit(signed_x) ? 0x80 : 0)) << signed_x;
    }
  }
  EXPECT_TRUE(IsE4M3Nan(FloatToE4M3(NAN)));
}

struct Fp8TestWeight {
  Fp8TestWeight(Random& random, int64_t n, int64_t k, int64_t group) : codes(n * k + 1) {
    view = {codes.data() + 1, DType::kE4M3, n, k, nullptr, group};
    for (uint8_t& code : codes) {
      do code = static_cast<uint8_t>(random.Int(0, 255));
      while (IsE4M3Nan(code));
    }
    scales.resize(n * view.num_scale_groups());
    for (float& scale : scales) scale = std::ldexp(1.0f + std::fabs(random.Normal()), random.Int(-9, -6));
    view.scales = scales.data();
  }
  std::vector<uint8_t> codes;  // misaligned on purpose
  std::vector<float> scales;
  WeightView view;
};

std::vector<float> Multiply(const KernelContext& ctx, const LinearWeight& w, const float* x, int64_t rows,
                            const float* bias) {
  std::vector<float> y(rows * w.out_features(), -7.0f);
  ExpectOk(cpu::Linear(ctx, {x, &w, bias, y.data(), rows}));
  return y;
}

std::vector<float> Reference(const WeightView& view, const std::vector<float>& x, int64_t rows, const float* bias) {
  const auto w = ref::PackLinear(view);
  EXPECT_TRUE(w.ok()) << w.status();
  std::vector<float> y(rows * view.out_features);
  ExpectOk(ref::Linear(KernelContext{}, {x.data(), w->get(), bias, y.data(), rows}));
  return y;
}

TEST(Fp8Linear, TheReferenceIsScaleTimesCode) {
  Random random(51);
  const int64_t n = 5, k = 200, rows = 3;
  Fp8TestWeight w(random, n, k, 64);
  const std::vector<float> x = random.Normals(rows * k), bias = random.Normals(n);
  const std::vector<float> got = Reference(w.view, x, rows, bias.data());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double want = bias[j], size = std::fabs(bias[j]);
      for (int64_t c = 0; c < k; ++c) {
        const double term =
            static_cast<double>(x[i * k + c]) * E4M3ToFloat(w.codes[1 + j * k + c]) * w.scales[j * 4 + c / 64];
        want += term;
        size += std::fabs(term);
      }
      EXPECT_NEAR(got[i * n + j], want, 1e-6 * size);
    }
  }
}

class Fp8LinearVariant : public ScaledLinearVariant {
 protected:
  std::unique_ptr<LinearWeight> Pack(const WeightView& view) {
    auto packed = cpu::Fp8Weight::Pack(view, GetParam().round_x);
    EXPECT_TRUE(packed.ok()) << packed.status();
    return *std::move(packed);
  }
};

TEST_P(Fp8LinearVariant, EqualsTheReferenceForRandomShapes) {
  Random random(52);
  std::vector<std::array<int64_t, 3>> shapes = {{1, 1, 0},     {32, 32, 32},  {33, 129, 128},  {16, 128, 128},
                                                {100, 48, 0},  {65, 2081, 0}, {48, 2100, 128}, {290, 640, 128},
                                                {31, 4500, 0}, {40, 95, 64}};
  for (int i = 0; i < 12; ++i)
    shapes.push_back({random.Int(1, 300), random.Int(1, 1500), std::array{0, 32, 128, 256}[random.Int(0, 3)]});
  for (const auto& [n, k, group] : shapes) {
    Fp8TestWeight w(random, n, k, group);
    const auto packed = Pack(w.view);
    for (int64_t rows : {1, 2, 5, 12, 13, 32, 33, 70}) {
      TestContext t(GetParam().isa, random.Int(1, 4));
      const std::vector<float> x = Rows(random, rows * k), bias = random.Normals(n);
      const float* b = rows % 2 == 0 ? bias.data() : nullptr;
      // Products are exact or rounded once, and sums are f32: held to the tolerance of f32.
      ExpectClose(Multiply(t.ctx, *packed, x.data(), rows, b), Reference(w.view, x, rows, b), DType::kF32,
                  std::to_string(rows) + " x " + std::to_string(k) + " x " + std::to_string(n) + ", groups of " +
                      std::to_string(group));
    }
  }
}

// Slices of any size, and rows one by one, give the same bits: widened in registers or in memory, on any threads.
TEST_P(Fp8LinearVariant, RowsAreIndependentBitForBit) {
  Random random(53);
  TestContext one(GetParam().isa, 1), two(GetParam().isa, 2), five(GetParam().isa, 5);
  for (const auto& [n, k, group] : std::vector<std::array<int64_t, 3>>{
           {320, 384, 0}, {384, 1024, 128}, {130, 100, 0}, {48, 4096, 128}, {40, 3000, 0}, {300, 2500, 128}}) {
    Fp8TestWeight w(random, n, k, group);
    const auto packed = Pack(w.view);
    constexpr int64_t kRows = 200;
    const std::vector<float> x = random.Normals(kRows * k), bias = random.Normals(n);
    const std::vector<float> all = Multiply(two.ctx, *packed, x.data(), kRows, bias.data());
    std::vector<int64_t> counts = {1, 2, 3, 4, 8, 12, 13, 15, 16, 17, 31, 32, 33, 64, 65, 129};
    for (int i = 0; i < 5; ++i) counts.push_back(random.Int(1, kRows));
    for (int64_t rows : counts) {
      const int64_t begin = random.Int(0, static_cast<int32_t>(kRows - rows));
      for (TestContext* t : {&one, &two, &five}) {
        ASSERT_TRUE(BitwiseEqual(Multiply(t->ctx, *packed, x.data() + begin * k, rows, bias.data()),
                                 std::span(all).subspan(begin * n, rows * n)))
            << rows << " rows from " << begin << " of " << k << " x " << n << ", " << t->pool.num_threads()
            << " threads";
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Cpu, Fp8LinearVariant, ::testing::ValuesIn(ScaledVariants()),
                         [](const ::testing::TestParamInfo<ScaledVariant>& info) {
                           return std::string(CpuIsaName(info.param.isa)) + (info.param.round_x ? "_bf16" : "_f32");
                         });

TEST(Fp8Linear, WidensEveryCode) {
  if (!CpuHasBf16Gemm()) GTEST_SKIP() << "no product of bf16 on this machine";
#if defined(__x86_64__)
  std::vector<uint8_t> codes(256);
  for (int i = 0; i < 256; ++i) codes[i] = static_cast<uint8_t>(i);
  alignas(64) bf16 wide[256];
  cpu::avx512_bf16::kFp8Bf16Gemm.widen(codes.data(), 256, wide);
  for (int i = 0; i < 256; ++i) {
    if (IsE4M3Nan(static_cast<uint8_t>(i))) continue;
    EXPECT_EQ(wide[i].bits, ToBf16(kE4M3Values[i]).bits) << i;
  }
#endif
}

// Backend::PackLinear and AdoptGrouped reach the CPU's default arithmetic, and the weights of experts.
TEST(Fp8Linear, ExpertsHaveTheirOwnScales) {
  Random random(54);
  constexpr int32_t kExperts = 3;
  constexpr int64_t n = 64, k = 256, rows = 7;
  Fp8TestWeight all(random, kExperts * n, k, 128);
  const GroupedWeightView view{.data = all.view.data,
                               .dtype = DType::kE4M3,
                               .num_experts = kExperts,
                               .out_features = n,
                               .in_features = k,
                               .scales = all.scales.data(),
                               .scale_group = 128};
  const auto got_weight = cpu::PackGrouped(view, GemmCompute::kF32);
  const auto ref_weight = ref::PackGrouped(view);
  ASSERT_TRUE(got_weight.ok() && ref_weight.ok()) << got_weight.status() << ref_weight.status();
  const std::vector<float> x = random.Normals(rows * k);
  const std::vector<int32_t> offsets = {0, 2, 2, rows};
  std::vector<float> got(rows * n), want(rows * n);
  TestContext t(DetectCpuIsa(), 2);
  ExpectOk(cpu::GroupedLinear(t.ctx, {x.data(), rows, nullptr, offsets.data(), got_weight->get(), got.data(), rows}));
  ExpectOk(ref::GroupedLinear(t.ctx, {x.data(), rows, nullptr, offsets.data(), ref_weight->get(), want.data(), rows}));
  ExpectClose(got, want, DType::kF32, "experts");
  for (int64_t row : {int64_t{1}, rows - 1}) {  // of expert 0 and of expert 2
    const WeightView expert = view.expert(row < 2 ? 0 : 2);
    const std::vector<float> one(x.begin() + row * k, x.begin() + (row + 1) * k);
    ExpectClose(std::span(got).subspan(row * n, n), Reference(expert, one, 1, nullptr), DType::kF32, "one row");
  }
}

TEST(Fp8Linear, RefusesWeightsWithoutTheirScales) {
  Random random(55);
  Fp8TestWeight w(random, 4, 64, 0);
  WeightView view = w.view;
  view.scales = nullptr;
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(cpu::PackLinear(view, GemmCompute::kAuto).status().code(), kInvalid);
  EXPECT_EQ(ref::PackLinear(view).status().code(), kInvalid);
  view = w.view;
  view.scale_group = 48;
  EXPECT_EQ(cpu::PackLinear(view, GemmCompute::kAuto).status().code(), kInvalid);
  view = w.view;
  view.dtype = DType::kBF16;
  EXPECT_EQ(ref::PackLinear(view).status().code(), kInvalid);
}

}  // namespace
}  // namespace spl::kernels
