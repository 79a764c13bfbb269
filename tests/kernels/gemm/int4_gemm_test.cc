// Products with int4 weights: the reference against a sum in double, and every CPU variant of this machine against the
// reference for random shapes, groups, zero points and column orders.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_int4_cpu.h"
#include "kernels/gemm/gemm_int4_isa.h"
#include "kernels/moe/grouped_linear.h"
#include "tests/kernels/gemm/scaled_linear_variant.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

struct Int4TestWeight {
  Int4TestWeight(Random& random, int64_t n, int64_t k, int64_t group, bool asymmetric, bool ordered)
      : bytes(n * k / 2 + 1) {
    view = {.data = bytes.data() + 1, .dtype = DType::kInt4, .out_features = n, .in_features = k, .scale_group = group};
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Int(0, 255));
    const int64_t groups = n * view.num_scale_groups();
    for (int64_t i = 0; i < groups; ++i) {
      scales.push_back(std::ldexp(1.0f + std::fabs(random.Normal()), random.Int(-9, -6)));
      zeros.push_back(static_cast<uint8_t>(random.Int(0, 16)));
    }
    order.resize(k);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = k - 1; i > 0; --i) std::swap(order[i], order[random.Int(0, static_cast<int32_t>(i))]);
    view.scales = scales.data();
    if (asymmetric) view.zeros = zeros.data();
    if (ordered) view.column_order = order.data();
  }
  // The factor of x's column `order[k]` in double.
  double Value(int64_t n, int64_t k) const {
    const int64_t at = n * view.in_features + k;
    const int code = at % 2 == 0 ? bytes[1 + at / 2] % 16 : bytes[1 + at / 2] / 16;
    const int64_t group = n * view.num_scale_groups() + (view.scale_group == 0 ? 0 : k / view.scale_group);
    return static_cast<double>(scales[group]) * (code - (view.zeros == nullptr ? 8 : zeros[group]));
  }

  std::vector<uint8_t> bytes;  // misaligned on purpose
  std::vector<float> scales;
  std::vector<uint8_t> zeros;
  std::vector<int32_t> order;
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

TEST(Int4Linear, TheReferenceIsScaleTimesCodeLessZero) {
  Random random(71);
  const int64_t n = 5, k = 200, rows = 3;
  for (const int form : {0, 1, 2, 3}) {
    const Int4TestWeight w(random, n, k, 64, form % 2 == 1, form >= 2);
    const std::vector<float> x = random.Normals(rows * k), bias = random.Normals(n);
    const std::vector<float> got = Reference(w.view, x, rows, bias.data());
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double want = bias[j], size = std::fabs(bias[j]);
        for (int64_t c = 0; c < k; ++c) {
          const double term = w.Value(j, c) * x[i * k + (form >= 2 ? w.order[c] : c)];
          want += term;
          size += std::fabs(term);
        }
        EXPECT_NEAR(got[i * n + j], want, 1e-6 * size);
      }
    }
  }
}

class Int4LinearVariant : public ScaledLinearVariant {
 protected:
  std::unique_ptr<LinearWeight> Pack(const WeightView& view) {
    auto packed = cpu::Int4Weight::Pack(view, GetParam().round_x);
    EXPECT_TRUE(packed.ok()) << packed.status();
    return *std::move(packed);
  }
};

TEST_P(Int4LinearVariant, EqualsTheReferenceForRandomShapes) {
  Random random(72);
  std::vector<std::array<int64_t, 3>> shapes = {{1, 2, 0},     {32, 32, 32},  {33, 130, 128},  {16, 128, 64},
                                                {100, 48, 0},  {65, 2082, 0}, {48, 2100, 128}, {290, 640, 128},
                                                {31, 4500, 0}, {40, 96, 64},  {64, 2048, 32}};
  for (int i = 0; i < 12; ++i)
    shapes.push_back({random.Int(1, 300), 2 * random.Int(1, 750), std::array{0, 32, 64, 128}[random.Int(0, 3)]});
  for (const auto& [n, k, group] : shapes) {
    const bool asymmetric = random.Int(0, 1) == 1, ordered = random.Int(0, 2) == 0;
    const Int4TestWeight w(random, n, k, group, asymmetric, ordered);
    const auto packed = Pack(w.view);
    for (int64_t rows : {1, 2, 5, 12, 13, 32, 33, 70}) {
      TestContext t(GetParam().isa, random.Int(1, 4));
      const std::vector<float> x = Rows(random, rows * k), bias = random.Normals(n);
      const float* b = rows % 2 == 0 ? bias.data() : nullptr;
      // Products are exact or rounded once, and sums are f32: held to the tolerance of f32.
      ExpectClose(Multiply(t.ctx, *packed, x.data(), rows, b), Reference(w.view, x, rows, b), DType::kF32,
                  std::to_string(rows) + " x " + std::to_string(k) + " x " + std::to_string(n) + ", groups of " +
                      std::to_string(group) + (asymmetric ? ", zero points" : "") + (ordered ? ", ordered" : ""));
    }
  }
}

// Slices of any size, and rows one by one, give the same bits: widened in registers or in memory, on any threads.
TEST_P(Int4LinearVariant, RowsAreIndependentBitForBit) {
  Random random(73);
  TestContext one(GetParam().isa, 1), two(GetParam().isa, 2), five(GetParam().isa, 5);
  for (const auto& [n, k, group] : std::vector<std::array<int64_t, 3>>{
           {320, 384, 0}, {384, 1024, 128}, {130, 100, 0}, {48, 4096, 32}, {40, 3000, 64}, {300, 2500, 128}}) {
    const Int4TestWeight w(random, n, k, group, random.Int(0, 1) == 1, random.Int(0, 1) == 1);
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
INSTANTIATE_TEST_SUITE_P(Cpu, Int4LinearVariant, ::testing::ValuesIn(ScaledVariants()),
                         [](const ::testing::TestParamInfo<ScaledVariant>& info) {
                           return std::string(CpuIsaName(info.param.isa)) + (info.param.round_x ? "_bf16" : "_f32");
                         });

TEST(Int4Linear, WidensEveryCodeWithEveryZeroPoint) {
  if (!CpuHasBf16Gemm()) GTEST_SKIP() << "no product of bf16 on this machine";
#if defined(__x86_64__)
  for (int zero = 0; zero <= 16; ++zero) {
    uint8_t codes[cpu::kInt4BlockBytes], offsets[32];
    for (int64_t i = 0; i < cpu::kInt4BlockBytes; ++i) codes[i] = static_cast<uint8_t>(i * 37 + i / 256);
    for (int c = 0; c < 32; ++c) offsets[c] = static_cast<uint8_t>(16 - (zero + c) % 17);
    alignas(64) bf16 wide[cpu::kBf16PairElements];
    cpu::avx512_bf16::kInt4Bf16Gemm.widen(codes, offsets, 1, wide);
    for (int64_t i = 0; i < cpu::kInt4BlockBytes; ++i) {
      const int64_t column = i % 32 / 2;
      for (const int64_t tile : {0, 1}) {
        const int code = tile == 0 ? codes[i] % 16 : codes[i] / 16;
        const auto want = static_cast<float>(code - static_cast<int>((zero + column + 16 * tile) % 17));
        EXPECT_EQ(ToFloat(wide[tile * cpu::kBf16TileElements + i]), want) << i << ", tile " << tile;
      }
    }
  }
#endif
}

TEST(Int4Linear, ExpertsHaveTheirOwnScalesAndZeros) {
  Random random(75);
  constexpr int32_t kExperts = 3;
  constexpr int64_t n = 64, k = 256, rows = 7;
  const Int4TestWeight all(random, kExperts * n, k, 128, true, false);
  const GroupedWeightView view{.data = all.view.data,
                               .dtype = DType::kInt4,
                               .num_experts = kExperts,
                               .out_features = n,
                               .in_features = k,
                               .scales = all.scales.data(),
                               .scale_group = 128,
                               .zeros = all.zeros.data()};
  const auto got_weight = cpu::PackGrouped(view, GemmCompute::kF32);
  ASSERT_TRUE(got_weight.ok()) << got_weight.status();
  const std::vector<float> x = random.Normals(rows * k);
  const std::vector<int32_t> offsets = {0, 2, 2, rows};
  std::vector<float> got(rows * n);
  TestContext t(DetectCpuIsa(), 2);
  ExpectOk(cpu::GroupedLinear(t.ctx, {x.data(), rows, nullptr, offsets.data(), got_weight->get(), got.data(), rows}));
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t expert = row < 2 ? 0 : 2;
    std::vector<float> want(n);
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t c = 0; c < k; ++c) sum += all.Value(expert * n + j, c) * x[row * k + c];
      want[j] = static_cast<float>(sum);
    }
    ExpectClose(std::span(got).subspan(row * n, n), want, DType::kF32, "row " + std::to_string(row));
  }
}

TEST(Int4Linear, RefusesWhatIsNoWeight) {
  Random random(76);
  const Int4TestWeight w(random, 4, 64, 32, true, true);
  const auto refused = [](const WeightView& view) {
    return cpu::PackLinear(view, GemmCompute::kAuto).status().code() == absl::StatusCode::kInvalidArgument &&
           ref::PackLinear(view).status().code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(ref::PackLinear(w.view).ok());
  WeightView view = w.view;
  view.scales = nullptr;
  EXPECT_TRUE(refused(view));
  view = w.view;
  view.scale_group = 48;
  EXPECT_TRUE(refused(view));
  view = w.view;
  view.in_features = 63;
  EXPECT_TRUE(refused(view));
  view = w.view;
  std::vector<uint8_t> zeros(8, 17);
  view.zeros = zeros.data();
  EXPECT_TRUE(refused(view));
  view = w.view;
  std::vector<int32_t> order(64, 3);
  view.column_order = order.data();
  EXPECT_TRUE(refused(view));
}

}  // namespace
}  // namespace spl::kernels
