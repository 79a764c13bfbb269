#include "kernels/activation/linear_silu_mul.h"

#include <memory>
#include <string>
#include <vector>

#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

class LinearSiluMul : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(LinearSiluMul, IsSiluMulOfTheProduct) {
  Random random(71);
  TestContext t(GetParam(), 3);
  for (const auto& [rows, width, in] :
       std::vector<std::array<int64_t, 3>>{{1, 1, 8}, {3, 17, 40}, {67, 96, 256}, {130, 100, 64}}) {
    const std::vector<float> x = random.Normals(rows * in), w = random.Normals(2 * width * in);
    const WeightView view{w.data(), DType::kF32, 2 * width, in};
    const auto weight = cpu::PackLinear(view, GemmCompute::kF32).value();
    std::vector<float> gate_up(rows * 2 * width), out(rows * width), want(rows * width);
    ExpectOk(cpu::LinearSiluMul(t.ctx, {x.data(), weight.get(), gate_up.data(), out.data(), rows}));
    ExpectOk(cpu::Linear(t.ctx, {x.data(), weight.get(), nullptr, gate_up.data(), rows}));
    ExpectOk(cpu::SiluMul(t.ctx, {gate_up.data(), want.data(), rows, width}));
    EXPECT_TRUE(BitwiseEqual(out, want)) << rows << " x " << width;

    const auto ref_weight = ref::PackLinear(view).value();
    ExpectOk(ref::LinearSiluMul({}, {x.data(), ref_weight.get(), gate_up.data(), want.data(), rows}));
    ExpectClose(out, want, DType::kF32, std::to_string(rows) + " x " + std::to_string(width));
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, LinearSiluMul, ::testing::ValuesIn(MachineIsas()), IsaParam);

TEST(LinearSiluMulValidation, RefusesWhatItCannotRun) {
  TestContext t(CpuIsa::kPortable);
  std::vector<float> x(8), w(6 * 8, 1.0f), gate_up(6), out(3);
  const auto even = cpu::PackLinear({w.data(), DType::kF32, 6, 8}, GemmCompute::kF32).value();
  const auto odd = cpu::PackLinear({w.data(), DType::kF32, 5, 8}, GemmCompute::kF32).value();
  for (const LinearSiluMulArgs& a : {LinearSiluMulArgs{x.data(), nullptr, gate_up.data(), out.data(), 1},
                                     LinearSiluMulArgs{x.data(), odd.get(), gate_up.data(), out.data(), 1},
                                     LinearSiluMulArgs{x.data(), even.get(), nullptr, out.data(), 1},
                                     LinearSiluMulArgs{x.data(), even.get(), gate_up.data(), nullptr, 1},
                                     LinearSiluMulArgs{x.data(), even.get(), gate_up.data(), out.data(), -1}}) {
    EXPECT_EQ(cpu::LinearSiluMul(t.ctx, a).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ref::LinearSiluMul(t.ctx, a).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(cpu::LinearSiluMul(t.ctx, {nullptr, even.get(), nullptr, nullptr, 0}).ok());
}

}  // namespace
}  // namespace spl::kernels
