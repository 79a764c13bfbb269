// Products of few rows with FP8 and int4 weights that normalize x, add to the residual stream or make SiLU(gate) * up
// on their way, against the same steps in kernels of their own: the same bits. Needs a Hopper GPU; skips without one.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/activation/activation_cuda.h"
#include "kernels/common/dtype.h"
#include "kernels/common/e4m3.h"
#include "kernels/gemm/fp8_gemm_cuda.h"
#include "kernels/gemm/int4_gemm_cuda.h"
#include "kernels/norm/norm_cuda.h"
#include "tests/kernels/support/cuda_test_util.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels::cuda {
namespace {

using testing::DeviceBuffer;
using testing::Random;

struct Codes {
  std::string name;
  bool int4 = false;
  int64_t group = 0;
};

// Residual rows, a weight and what belongs to them, on the device and where the host needs them.
struct Problem {
  static constexpr int64_t kRows = 8;

  Problem(Random& random, const Codes& type, int64_t out, int64_t in)
      : type(type),
        out(out),
        in(in),
        groups(type.group == 0 ? 1 : (in + type.group - 1) / type.group),
        codes(CodesOf(random, type, out, in)),
        scales(Scales(random, out * groups)),
        zeros(Zeros(random, out * groups)),
        residual(random.Normals((kRows + 1) * in)),
        device_codes(codes),
        device_scales(scales),
        device_zeros(zeros),
        device_residual(residual),
        norm(random.Normals(in)),
        bias(random.Normals(out)) {
    CHECK_CUDA(type.int4 ? ArrangeInt4Codes(device_codes.get(), static_cast<int64_t>(codes.size()), nullptr)
                         : ArrangeFp8Codes(device_codes.get(), static_cast<int64_t>(codes.size()), nullptr));
  }
  static std::vector<uint8_t> CodesOf(Random& random, const Codes& type, int64_t out, int64_t in) {
    std::vector<uint8_t> codes(static_cast<size_t>(type.int4 ? out * in / 2 : out * in));
    for (uint8_t& code : codes) {
      do {
        code = static_cast<uint8_t>(random.engine()());
      } while (!type.int4 && IsE4M3Nan(code));
    }
    return codes;
  }
  static std::vector<float> Scales(Random& random, int64_t count) {
    std::vector<float> scales = random.Normals(static_cast<size_t>(count));
    for (float& scale : scales) scale = 0.01f * (1 + std::fabs(scale));
    return scales;
  }
  static std::vector<uint8_t> Zeros(Random& random, int64_t count) {
    std::vector<uint8_t> zeros(static_cast<size_t>(count));
    for (uint8_t& zero : zeros) zero = static_cast<uint8_t>(random.Int(0, 16));
    return zeros;
  }

  template <typename Args>
  Args Filled(const void* x, void* y, DType y_dtype, int64_t rows, const LinearFusion& fusion, bool with_bias) const {
    Args args;
    args.x = x;
    args.codes = device_codes.get();
    args.scales = device_scales.get();
    args.scale_group = type.group;
    args.bias = with_bias ? bias.get() : nullptr;
    args.y = y;
    args.y_dtype = y_dtype;
    args.num_rows = rows;
    args.out_features = out;
    args.in_features = in;
    args.fusion = fusion;
    return args;
  }
  cudaError_t Multiply(const void* x, void* y, DType y_dtype, int64_t rows, const LinearFusion& fusion = {},
                       bool with_bias = false) const {
    if (!type.int4) return Fp8Gemm(Filled<Fp8GemmArgs>(x, y, y_dtype, rows, fusion, with_bias), nullptr);
    auto args = Filled<Int4GemmArgs>(x, y, y_dtype, rows, fusion, with_bias);
    args.zeros = device_zeros.get();
    return Int4Gemm(args, false, nullptr);
  }
  bool OnePass(int64_t rows) const {
    return type.int4 ? FitsSkinnyInt4GemmSm90(Filled<Int4GemmArgs>(nullptr, nullptr, DType::kF32, rows, {}, false))
                     : FitsSkinnyFp8GemmSm90(Filled<Fp8GemmArgs>(nullptr, nullptr, DType::kF32, rows, {}, false));
  }
  LinearFusion Norm() const { return {.norm = {norm.get(), 1e-5f}}; }

  // Rows of the norm in bf16, by its own kernel.
  DeviceBuffer<uint16_t> Normalized(int64_t rows) const {
    DeviceBuffer<uint16_t> normed(static_cast<size_t>(kRows * in));
    CHECK_CUDA(RmsNorm({.residual = device_residual.get(),
                        .weight = norm.get(),
                        .out = {normed.get(), DType::kBF16},
                        .num_rows = rows,
                        .width = in,
                        .eps = 1e-5f},
                       nullptr));
    return normed;
  }
  double Weight(int64_t j, int64_t k) const {
    const int64_t of_group = j * groups + (type.group == 0 ? 0 : k / type.group);
    if (!type.int4) return double{E4M3ToFloat(codes[j * in + k])} * scales[of_group];
    const uint8_t byte = codes[(j * in + k) / 2];
    return ((k % 2 == 0 ? byte % 16 : byte / 16) - int{zeros[of_group]}) * double{scales[of_group]};
  }
  std::string Name(int64_t rows) const {
    return std::to_string(out) + " x " + std::to_string(in) + ", " + std::to_string(rows) + " rows";
  }

  Codes type;
  int64_t out, in, groups;
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  std::vector<uint8_t> zeros;
  std::vector<float> residual;
  DeviceBuffer<uint8_t> device_codes;
  DeviceBuffer<float> device_scales;
  DeviceBuffer<uint8_t> device_zeros;
  DeviceBuffer<float> device_residual, norm, bias;
};

// Every bit pattern, also that of rows that must not be written (0xff...: NaN).
template <typename T>
DeviceBuffer<T> Unwritten(int64_t count) {
  DeviceBuffer<T> buffer(static_cast<size_t>(count));
  buffer.Fill(0xff);
  return buffer;
}
template <typename T>
bool SameBits(const DeviceBuffer<T>& a, const DeviceBuffer<T>& b) {
  CHECK_CUDA(cudaDeviceSynchronize());
  const std::vector<T> left = a.Read(), right = b.Read();
  return left.size() == right.size() && std::memcmp(left.data(), right.data(), left.size() * sizeof(T)) == 0;
}

// Features, columns: odd edges, fewer groups than warps, rows of 128 n + 32 columns, and layers of an 8B model.
const std::vector<std::pair<int64_t, int64_t>> kShapes = {{8, 32},     {16, 128},   {40, 160},    {24, 1952},
                                                          {136, 2080}, {384, 1024}, {1000, 4096}, {6144, 4096},
                                                          {520, 8192}, {72, 14336}, {16, 16384}};

class FusedGemmCudaTest : public ::testing::TestWithParam<Codes> {
 protected:
  void SetUp() override {
    if (!testing::HasGpu()) GTEST_SKIP() << "no CUDA device";
    int major = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (major != 9) GTEST_SKIP() << "a kernel for Hopper only";
  }
  template <typename Check>
  void ForAll(uint64_t seed, const Check& check) {
    Random random(seed);
    for (const auto& [out, in] : kShapes) {
      const Problem p(random, GetParam(), out, in);
      for (int64_t rows = 1; rows <= Problem::kRows; ++rows) check(p, rows);
    }
  }
};

TEST_P(FusedGemmCudaTest, NormalizesXAsItsOwnKernel) {
  ForAll(90, [](const Problem& p, int64_t rows) {
    const auto fused = Unwritten<float>((rows + 1) * p.out), alone = Unwritten<float>((rows + 1) * p.out);
    const cudaError_t e = p.Multiply(p.device_residual.get(), fused.get(), DType::kF32, rows, p.Norm(), true);
    if (!p.OnePass(rows)) {
      EXPECT_EQ(e, cudaErrorNotSupported) << p.Name(rows);
      return;
    }
    CHECK_CUDA(e);
    const DeviceBuffer<uint16_t> normed = p.Normalized(rows);
    CHECK_CUDA(p.Multiply(normed.get(), alone.get(), DType::kF32, rows, {}, true));
    EXPECT_TRUE(SameBits(fused, alone)) << p.Name(rows);
  });
}

TEST_P(FusedGemmCudaTest, AddsToTheResidualAsTheNormBehindIt) {
  ForAll(91, [](const Problem& p, int64_t rows) {
    Random random(static_cast<uint64_t>(rows));
    // x and the residual rows of the layer's output, `out` wide.
    std::vector<uint16_t> bits;
    for (const float value : random.Normals(static_cast<size_t>(rows * p.in))) bits.push_back(ToBf16(value).bits);
    const DeviceBuffer<uint16_t> x(bits), normed(static_cast<size_t>(rows * p.out));
    const std::vector<float> before = random.Normals(static_cast<size_t>((rows + 1) * p.out));
    const DeviceBuffer<float> fused(before), alone(before), weight(before), delta(before.size());
    for (const bool with_bias : {false, true}) {
      CHECK_CUDA(p.Multiply(x.get(), fused.get(), DType::kF32, rows, {.adds = true}, with_bias));
      CHECK_CUDA(p.Multiply(x.get(), delta.get(), DType::kF32, rows, {}, with_bias));
      CHECK_CUDA(RmsNorm({.residual = alone.get(),
                          .delta = ConstActivations(delta.get()),
                          .weight = weight.get(),
                          .out = {normed.get(), DType::kBF16},
                          .num_rows = rows,
                          .width = p.out},
                         nullptr));
      EXPECT_TRUE(SameBits(fused, alone)) << p.Name(rows) << (with_bias ? ", with bias" : "");
    }
  });
}

template <typename T>
void ExpectActivated(const Problem& p, int64_t rows, bool with_norm) {
  constexpr DType kType = sizeof(T) == 4 ? DType::kF32 : DType::kBF16;
  const DeviceBuffer<uint16_t> normed = p.Normalized(rows);
  const auto fused = Unwritten<T>((rows + 1) * p.out / 2), alone = Unwritten<T>((rows + 1) * p.out / 2);
  const DeviceBuffer<float> gate_up(static_cast<size_t>(rows * p.out));
  LinearFusion fusion = with_norm ? p.Norm() : LinearFusion{};
  fusion.silu_mul = true;
  const void* const x = with_norm ? static_cast<const void*>(p.device_residual.get()) : normed.get();
  const cudaError_t e = p.Multiply(x, fused.get(), kType, rows, fusion);
  if (!p.OnePass(rows)) {
    EXPECT_EQ(e, cudaErrorNotSupported) << p.Name(rows);
    return;
  }
  CHECK_CUDA(e);
  CHECK_CUDA(p.Multiply(normed.get(), gate_up.get(), DType::kF32, rows));
  CHECK_CUDA(SiluMul(
      {.gate_up = ConstActivations(gate_up.get()), .out = {alone.get(), kType}, .num_rows = rows, .width = p.out / 2},
      nullptr));
  EXPECT_TRUE(SameBits(fused, alone)) << p.Name(rows) << (with_norm ? ", normalized" : "");
}

TEST_P(FusedGemmCudaTest, ActivatesAsItsOwnKernel) {
  ForAll(92, [](const Problem& p, int64_t rows) {
    for (const bool with_norm : {false, true}) {
      ExpectActivated<uint16_t>(p, rows, with_norm);
      ExpectActivated<float>(p, rows, with_norm);
    }
  });
}

// Not only equal to each other: the product of the normalized rows, which are rounded to bf16, in double.
TEST_P(FusedGemmCudaTest, IsTheProduct) {
  ForAll(93, [](const Problem& p, int64_t rows) {
    if (!p.OnePass(rows) || p.out * p.in > (1 << 19)) return;
    const auto fused = Unwritten<float>((rows + 1) * p.out);
    CHECK_CUDA(p.Multiply(p.device_residual.get(), fused.get(), DType::kF32, rows, p.Norm()));
    const DeviceBuffer<uint16_t> normed = p.Normalized(rows);
    CHECK_CUDA(cudaDeviceSynchronize());
    const std::vector<uint16_t> x = normed.Read();
    const std::vector<float> y = fused.Read();
    double worst = 0;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < p.out; ++j) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < p.in; ++k) {
          const double term = double{ToFloat(bf16{x[r * p.in + k]})} * p.Weight(j, k);
          sum += term;
          size += std::abs(term);
        }
        const double error = std::abs(y[r * p.out + j] - sum) / (size * 0x1p-24);
        worst = std::isfinite(error) ? std::max(worst, error) : INFINITY;
      }
    }
    EXPECT_LT(worst, 4 + 2 * std::sqrt(static_cast<double>(p.in))) << p.Name(rows);
  });
}

TEST_P(FusedGemmCudaTest, RefusesWhatItDoesNotServe) {
  Random random(94);
  const Problem p(random, GetParam(), 40, 160), odd(random, GetParam(), 12, 160);
  const DeviceBuffer<float> y(static_cast<size_t>(4096));
  LinearFusion both{.silu_mul = true, .adds = true};
  EXPECT_EQ(p.Multiply(p.device_residual.get(), y.get(), DType::kF32, 1, both), cudaErrorNotSupported);
  EXPECT_EQ(p.Multiply(p.device_residual.get(), y.get(), DType::kBF16, 1, {.adds = true}), cudaErrorNotSupported);
  EXPECT_EQ(odd.Multiply(p.device_residual.get(), y.get(), DType::kF32, 1, {.silu_mul = true}), cudaErrorNotSupported);
}

INSTANTIATE_TEST_SUITE_P(Kernels, FusedGemmCudaTest,
                         ::testing::Values(Codes{"Fp8"}, Codes{"Fp8Groups", false, 128}, Codes{"Int4", true, 0},
                                           Codes{"Int4Groups128", true, 128}, Codes{"Int4Groups256", true, 256}),
                         [](const ::testing::TestParamInfo<Codes>& info) { return info.param.name; });

}  // namespace
}  // namespace spl::kernels::cuda
