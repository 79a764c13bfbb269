#include "kernels/gemm/gemm.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "kernels/gemm/gemm_bf16_cpu.h"
#include "kernels/gemm/gemm_cpu.h"
#include "kernels/gemm/gemm_validate.h"
#include "kernels/gemm/rows_of_choice.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

// A weight as in a checkpoint; misaligned on purpose, as a tensor in a mapped file may be.
struct TestWeight {
  TestWeight(Random& random, int64_t n, int64_t k, DType dtype) : bytes(n * k * DTypeBytes(dtype) + 1) {
    view = {bytes.data() + 1, dtype, n, k};
    for (int64_t i = 0; i < n * k; ++i) {
      const float x = random.Normal();
      const uint16_t half =
          static_cast<uint16_t>(random.Int(0, 1) << 15 | random.Int(10, 18) << 10 | random.Int(0, 1023));
      const bf16 b = ToBf16(x);
      unsigned char* at = bytes.data() + 1 + i * DTypeBytes(dtype);
      if (dtype == DType::kF32) std::memcpy(at, &x, 4);
      if (dtype == DType::kBF16) std::memcpy(at, &b, 2);
      if (dtype == DType::kF16) std::memcpy(at, &half, 2);
    }
  }
  std::vector<unsigned char> bytes;
  WeightView view;
};

std::vector<float> Multiply(const KernelContext& ctx, const LinearWeight& w, const float* x, int64_t rows,
                            const float* bias = nullptr) {
  std::vector<float> y(rows * w.out_features(), -7.0f);
  LinearArgs a{x, &w, bias, y.data(), rows};
  const absl::Status s = cpu::Linear(ctx, a);
  EXPECT_TRUE(s.ok()) << s;
  return y;
}

std::vector<float> Want(const WeightView& view, const std::vector<float>& x, int64_t rows, const float* bias) {
  const auto w = ref::PackLinear(view);
  std::vector<float> y(rows * view.out_features);
  LinearArgs a{x.data(), w->get(), bias, y.data(), rows};
  EXPECT_TRUE(ref::Linear(KernelContext{}, a).ok());
  return y;
}

// ExpectClose, relative to the size that each sum has when its terms do not cancel: a single sum may be almost nothing.
void ExpectCloseSums(const std::vector<float>& got, const WeightView& view, const std::vector<float>& x, int64_t rows,
                     const float* bias, const std::string& what) {
  const std::vector<float> want = Want(view, x, rows, bias);
  std::vector<float> squares = x;
  for (float& value : squares) value *= value;
  std::vector<float> weights(static_cast<size_t>(view.out_features * view.in_features));
  WidenWeight(view, 0, static_cast<int64_t>(weights.size()), weights.data());
  for (float& value : weights) value *= value;
  std::vector<float> sizes =
      Want({weights.data(), DType::kF32, view.out_features, view.in_features}, squares, rows, nullptr);
  for (size_t i = 0; i < sizes.size(); ++i) {
    const float b = bias == nullptr ? 0 : bias[i % static_cast<size_t>(view.out_features)];
    sizes[i] = std::sqrt(sizes[i] + b * b);
  }
  ExpectClose(got, want, sizes, DType::kF32, what);
}

TEST(Linear, EqualsReferenceForTypesShapesAndRows) {
  Random random(31);
  TestContext t(DetectCpuIsa());
  const std::pair<int64_t, int64_t> shapes[] = {{1024, 384}, {384, 512}, {100, 48},  {1, 7},
                                                {65, 129},   {130, 1},   {192, 1000}};
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& [n, k] : shapes) {
      TestWeight w(random, n, k, dtype);
      const auto packed = cpu::PackLinear(w.view, GemmCompute::kF32);
      ASSERT_TRUE(packed.ok()) << packed.status();
      for (int64_t rows : {1, 2, 3, 17, 64, 65, 130, 300}) {
        const std::vector<float> x = random.Normals(rows * k), bias = random.Normals(n);
        const float* b = rows % 2 == 0 ? bias.data() : nullptr;
        ExpectCloseSums(Multiply(t.ctx, **packed, x.data(), rows, b), w.view, x, rows, b,
                        std::to_string(rows) + " x " + std::to_string(k) + " x " + std::to_string(n));
      }
    }
  }
}

class PanelLinear : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(PanelLinear, EqualsReferenceAndRowsAreIndependent) {
  Random random(32);
  TestContext t(GetParam(), 3);
  for (const auto& [n, k] :
       std::vector<std::pair<int64_t, int64_t>>{{130, 384}, {64, 48}, {1, 7}, {65, 129}, {300, 1000}}) {
    TestWeight w(random, n, k, DType::kBF16);
    const cpu::PanelWeight packed(w.view);
    const std::vector<float> x = random.Normals(200 * k), bias = random.Normals(n);
    const std::vector<float> all = Multiply(t.ctx, packed, x.data(), 200, bias.data());
    ExpectClose(all, Want(w.view, x, 200, bias.data()), DType::kF32, "panel");
    for (int64_t rows : {1, 2, 5, 6, 7, 33, 129}) {
      EXPECT_TRUE(BitwiseEqual(Multiply(t.ctx, packed, x.data(), rows, bias.data()), std::span(all).first(rows * n)));
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Cpu, PanelLinear, ::testing::ValuesIn(MachineIsas()), IsaParam);

// The prefill of a prompt in slices of any size, and its decoding row by row, must give the same bits.
void ExpectRowsIndependent(GemmCompute compute, int64_t n, int64_t k, CpuIsa isa = DetectCpuIsa()) {
  Random random(33);
  TestContext one(isa, 1), two(isa, 2), five(isa, 5);
  TestWeight w(random, n, k, DType::kBF16);
  const auto packed = cpu::PackLinear(w.view, compute);
  ASSERT_TRUE(packed.ok()) << packed.status();
  constexpr int64_t kRows = 600;
  const std::vector<float> x = random.Normals(kRows * k), bias = random.Normals(n);
  for (const float* b : {static_cast<const float*>(nullptr), bias.data()}) {
    const std::vector<float> all = Multiply(two.ctx, **packed, x.data(), kRows, b);
    std::vector<int64_t> counts = {1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 129, 512};
    for (int i = 0; i < 12; ++i) counts.push_back(random.Int(1, kRows));
    for (int64_t rows : counts) {
      const int64_t begin = random.Int(0, static_cast<int32_t>(kRows - rows));
      for (TestContext* t : {&one, &two, &five}) {
        ASSERT_TRUE(BitwiseEqual(Multiply(t->ctx, **packed, x.data() + begin * k, rows, b),
                                 std::span(all).subspan(begin * n, rows * n)))
            << rows << " rows from " << begin << " of " << k << " x " << n << ", " << t->pool.num_threads()
            << " threads";
      }
    }
  }
}

TEST(Linear, RowsAreIndependentBitForBit) {
  for (const auto& [n, k] : std::vector<std::pair<int64_t, int64_t>>{
           {1024, 384}, {384, 512}, {2048, 384}, {384, 1024}, {4096, 384}, {130, 100}, {48, 4096}, {320, 3000}}) {
    ExpectRowsIndependent(GemmCompute::kF32, n, k);
  }
}

TEST(Linear, Bf16IsRefusedWhereTheMachineHasNone) {
  Random random(34);
  TestWeight w(random, 320, 384, DType::kBF16);
  const auto packed = cpu::PackLinear(w.view, GemmCompute::kBF16);
  if (CpuHasBf16Gemm()) {
    ASSERT_TRUE(packed.ok()) << packed.status();
    TestContext without(CpuIsa::kAvx512);  // asked for and not there: an error, never another product
    const std::vector<float> x(384);
    std::vector<float> y(320);
    EXPECT_EQ(cpu::Linear(without.ctx, {x.data(), packed->get(), nullptr, y.data(), 1}).code(),
              absl::StatusCode::kUnimplemented);
  } else {
    EXPECT_EQ(packed.status().code(), absl::StatusCode::kUnimplemented);
  }
}

float FlushDenormal(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
float Fma(float a, float b, float c) { return FlushDenormal(std::fma(a, b, c)); }
float Bf16At(std::span<const float> v, int64_t i) {
  return i < static_cast<int64_t>(v.size()) ? FlushDenormal(ToFloat(ToBf16(v[i]))) : 0.0f;
}

// What gemm_bf16_isa.h says of the order of sums, for one row and one column. It knows of no other row.
float Bf16Definition(CpuIsa isa, std::span<const float> x, std::span<const float> w) {
  float sum = 0;
  for (int64_t block = 0; block < static_cast<int64_t>(x.size()); block += cpu::kBf16DepthBlock) {
    float even = 0, odd = 0;
    for (int64_t k = block; k < block + cpu::kBf16DepthBlock; k += 2) {
      if (isa == CpuIsa::kAmx) {
        even = Fma(Bf16At(x, k), Bf16At(w, k), even);
        odd = Fma(Bf16At(x, k + 1), Bf16At(w, k + 1), odd);
      } else {
        sum = Fma(Bf16At(x, k + 1), Bf16At(w, k + 1), sum);
        sum = Fma(Bf16At(x, k), Bf16At(w, k), sum);
      }
    }
    if (isa == CpuIsa::kAmx) sum = FlushDenormal(sum + FlushDenormal(even + odd));
  }
  return sum;
}

class Bf16Linear : public ::testing::TestWithParam<CpuIsa> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Bf16Linear);

// Edges of tiles (16 rows, 16 columns, 32 depths), of panels, of groups (8 panels) and of depth parts (512, 2,048).
TEST_P(Bf16Linear, IsItsDefinitionBitForBit) {
  Random random(37);
  for (const auto& [n, k] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {16, 32}, {17, 33}, {32, 512}, {33, 515}, {290, 64}, {65, 2047}, {48, 2081}, {31, 4500}}) {
    for (DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
      TestWeight w(random, n, k, dtype);
      const auto packed = cpu::PackLinear(w.view, GemmCompute::kBF16);
      ASSERT_TRUE(packed.ok()) << packed.status();
      std::vector<float> wide(n * k);
      WidenWeight(w.view, 0, n * k, wide.data());
      for (int64_t rows : {1, 2, 15, 16, 17, 31, 32, 33, 50, 1100}) {
        if (rows > 50 && k < 2048) continue;  // more than the rows of one task, with sums that wait
        std::vector<float> x = random.Normals(rows * k);
        for (int i = 0; i < 4; ++i) x[random.Int(0, static_cast<int32_t>(x.size()) - 1)] = 1e-39f;
        const std::vector<float> bias = random.Normals(n);
        const float* b = rows % 2 == 0 ? bias.data() : nullptr;
        TestContext t(GetParam(), random.Int(1, 4));
        const std::vector<float> got = Multiply(t.ctx, **packed, x.data(), rows, b);
        const int64_t step = std::max<int64_t>(1, rows * n * k / 1'000'000);
        for (int64_t at = random.Int(0, static_cast<int32_t>(step) - 1); at < rows * n; at += step) {
          const int64_t r = at / n, c = at % n;
          float want = Bf16Definition(GetParam(), std::span(x).subspan(r * k, k), std::span(wide).subspan(c * k, k));
          if (b != nullptr) want += b[c];
          ASSERT_EQ(got[at], want) << "row " << r << " of " << rows << ", column " << c << " of " << n << ", depth "
                                   << k << ", " << DTypeName(dtype);
        }
      }
    }
  }
}

TEST_P(Bf16Linear, IsCloseAndRowsAreIndependent) {
  Random random(34);
  TestContext t(GetParam());
  TestWeight w(random, 320, 384, DType::kBF16);
  const auto packed = cpu::PackLinear(w.view, GemmCompute::kAuto);
  ASSERT_TRUE(packed.ok()) << packed.status();
  const std::vector<float> x = random.Normals(70 * 384);
  ExpectClose(Multiply(t.ctx, **packed, x.data(), 70), Want(w.view, x, 70, nullptr), DType::kBF16, "bf16");
  for (const auto& [n, k] : std::vector<std::pair<int64_t, int64_t>>{
           {320, 384}, {1024, 384}, {384, 1024}, {130, 100}, {48, 4096}, {320, 3000}}) {
    ExpectRowsIndependent(GemmCompute::kBF16, n, k, GetParam());
  }
}

// An infinity or NaN stays in its row; what lies in memory behind the last row or depth is not multiplied.
TEST_P(Bf16Linear, InfinityAndNanStayInTheirRow) {
  Random random(38);
  TestContext t(GetParam(), 2);
  constexpr int64_t kOut = 40, kIn = 70, kRows = 20;
  TestWeight w(random, kOut, kIn, DType::kBF16);
  const auto packed = cpu::PackLinear(w.view, GemmCompute::kBF16);
  ASSERT_TRUE(packed.ok()) << packed.status();
  std::vector<float> x = random.Normals(kRows * kIn);
  const std::vector<float> clean = Multiply(t.ctx, **packed, x.data(), kRows);
  x[3 * kIn + 5] = INFINITY;
  x[18 * kIn + kIn - 1] = NAN;
  const std::vector<float> got = Multiply(t.ctx, **packed, x.data(), kRows);
  for (int64_t r = 0; r < kRows; ++r) {
    if (r == 3 || r == 18) {
      for (int64_t c = 0; c < kOut; ++c) EXPECT_FALSE(std::isfinite(got[r * kOut + c])) << r << ", " << c;
    } else {
      EXPECT_TRUE(BitwiseEqual(std::span(got).subspan(r * kOut, kOut), std::span(clean).subspan(r * kOut, kOut)));
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Cpu, Bf16Linear, ::testing::ValuesIn(MachineBf16Isas()), IsaParam);

TEST(Linear, ThreadsShareAWeight) {
  Random random(35);
  TestWeight w(random, 256, 128, DType::kF32);
  const auto packed = cpu::PackLinear(w.view, GemmCompute::kF32);
  ASSERT_TRUE(packed.ok());
  const std::vector<float> x = random.Normals(200 * 128);
  TestContext alone(DetectCpuIsa(), 1);
  const std::vector<float> want = Multiply(alone.ctx, **packed, x.data(), 200);
  std::vector<std::thread> threads;
  std::vector<int> bad(3, 0);
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      TestContext t(DetectCpuIsa(), 2);
      for (int64_t rows = 1 + i; rows <= 200; rows += 13) {
        if (!BitwiseEqual(Multiply(t.ctx, **packed, x.data(), rows), std::span(want).first(rows * 256))) ++bad[i];
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(bad, std::vector<int>(3, 0));
}

TEST(LinearValidation, RefusesWhatItCannotRun) {
  Random random(36);
  TestContext t(DetectCpuIsa());
  TestWeight w(random, 4, 8, DType::kF32);
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  WeightView view = w.view;
  view.data = nullptr;
  EXPECT_EQ(cpu::PackLinear(view, GemmCompute::kF32).status().code(), kInvalid);
  EXPECT_EQ(ref::PackLinear(view).status().code(), kInvalid);
  view = w.view;
  view.in_features = 0;
  EXPECT_EQ(cpu::PackLinear(view, GemmCompute::kF32).status().code(), kInvalid);
  const auto packed = cpu::PackLinear(w.view, GemmCompute::kF32);
  const auto plain = ref::PackLinear(w.view);
  ASSERT_TRUE(packed.ok() && plain.ok());
  std::vector<float> x(8), y(4);
  EXPECT_TRUE(cpu::Linear(t.ctx, {nullptr, packed->get(), nullptr, nullptr, 0}).ok());
  EXPECT_EQ(cpu::Linear(t.ctx, {x.data(), nullptr, nullptr, y.data(), 1}).code(), kInvalid);
  EXPECT_EQ(cpu::Linear(t.ctx, {nullptr, packed->get(), nullptr, y.data(), 1}).code(), kInvalid);
  EXPECT_EQ(cpu::Linear(t.ctx, {x.data(), packed->get(), nullptr, x.data(), 1}).code(), kInvalid);
  EXPECT_EQ(cpu::Linear(t.ctx, {x.data(), packed->get(), nullptr, y.data(), -1}).code(), kInvalid);
  EXPECT_EQ(cpu::Linear(t.ctx, {x.data(), plain->get(), nullptr, y.data(), 1}).code(), kInvalid);
  EXPECT_EQ(ref::Linear(t.ctx, {x.data(), packed->get(), nullptr, y.data(), 1}).code(), kInvalid);
}

// Neighbouring numbers of rows share an algorithm, whichever comes first: the one for the largest of them.
TEST(RowsOfChoice, AreThoseOfTheLargestNeighbour) {
  for (int64_t rows = 1; rows <= 8192; ++rows) {
    const int64_t asked = cuda::RowsOfChoice(rows);
    EXPECT_GE(asked, rows);
    EXPECT_LE(asked - rows, std::max<int64_t>(rows <= 64 ? 0 : 15, rows / 8)) << rows;
    EXPECT_EQ(cuda::RowsOfChoice(asked), asked) << rows;
  }
  EXPECT_EQ(cuda::RowsOfChoice(200), 208);
  EXPECT_EQ(cuda::RowsOfChoice(256), 256);
}

}  // namespace
}  // namespace spl::kernels
