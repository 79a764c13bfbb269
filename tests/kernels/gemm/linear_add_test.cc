#include "kernels/gemm/linear_add.h"

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "kernels/norm/norm.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

class LinearAdd : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(LinearAdd, IsTheSumOfYAndTheProduct) {
  Random random(72);
  TestContext t(GetParam(), 3);
  for (const auto& [rows, out, in] :
       std::vector<std::array<int64_t, 3>>{{1, 1, 8}, {3, 17, 40}, {67, 96, 256}, {300, 200, 64}}) {
    const std::vector<float> x = random.Normals(rows * in), w = random.Normals(out * in),
                             y = random.Normals(rows * out);
    const WeightView view{w.data(), DType::kF32, out, in};
    const auto weight = cpu::PackLinear(view, GemmCompute::kF32).value();
    std::vector<float> product(rows * out), got = y, want = y;
    ExpectOk(cpu::LinearAdd(t.ctx, {x.data(), weight.get(), got.data(), product.data(), rows}));
    ExpectOk(cpu::Linear(t.ctx, {x.data(), weight.get(), nullptr, product.data(), rows}));
    for (size_t i = 0; i < want.size(); ++i) want[i] += product[i];
    EXPECT_TRUE(BitwiseEqual(got, want)) << rows << " x " << out;

    const auto ref_weight = ref::PackLinear(view).value();
    want = y;
    ExpectOk(ref::LinearAdd({}, {x.data(), ref_weight.get(), want.data(), product.data(), rows}));
    ExpectClose(got, want, DType::kF32, std::to_string(rows) + " x " + std::to_string(out));
  }
}

// An engine may add the product here or in the norm behind it.
TEST_P(LinearAdd, LeavesWhatANormWithADeltaLeaves) {
  Random random(73);
  TestContext t(GetParam(), 3);
  const int64_t rows = 9, out = 64, in = 96;
  const std::vector<float> x = random.Normals(rows * in), w = random.Normals(out * in), y = random.Normals(rows * out),
                           ones(out, 1.0f);
  const auto weight = cpu::PackLinear({w.data(), DType::kF32, out, in}, GemmCompute::kF32).value();
  std::vector<float> product(rows * out), added = y, residual = y, normed(rows * out), want(rows * out);
  ExpectOk(cpu::LinearAdd(t.ctx, {x.data(), weight.get(), added.data(), product.data(), rows}));
  ExpectOk(cpu::RmsNorm(t.ctx, {added.data(), {}, ones.data(), normed.data(), rows, out}));
  ExpectOk(cpu::Linear(t.ctx, {x.data(), weight.get(), nullptr, product.data(), rows}));
  ExpectOk(cpu::RmsNorm(t.ctx, {residual.data(), product.data(), ones.data(), want.data(), rows, out}));
  EXPECT_TRUE(BitwiseEqual(added, residual));
  EXPECT_TRUE(BitwiseEqual(normed, want));
}

INSTANTIATE_TEST_SUITE_P(Cpu, LinearAdd, ::testing::ValuesIn(MachineIsas()), IsaParam);

TEST(LinearAddValidation, RefusesWhatItCannotRun) {
  TestContext t(CpuIsa::kPortable);
  std::vector<float> x(8), w(8 * 8, 1.0f), y(8), product(8);
  const auto weight = cpu::PackLinear({w.data(), DType::kF32, 8, 8}, GemmCompute::kF32).value();
  for (const LinearAddArgs& a : {LinearAddArgs{x.data(), nullptr, y.data(), product.data(), 1},
                                 LinearAddArgs{nullptr, weight.get(), y.data(), product.data(), 1},
                                 LinearAddArgs{x.data(), weight.get(), nullptr, product.data(), 1},
                                 LinearAddArgs{x.data(), weight.get(), y.data(), nullptr, 1},
                                 LinearAddArgs{x.data(), weight.get(), y.data(), y.data(), 1},
                                 LinearAddArgs{x.data(), weight.get(), x.data(), product.data(), 1},
                                 LinearAddArgs{x.data(), weight.get(), y.data(), product.data(), -1}}) {
    EXPECT_EQ(cpu::LinearAdd(t.ctx, a).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ref::LinearAdd(t.ctx, a).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(cpu::LinearAdd(t.ctx, {nullptr, weight.get(), nullptr, nullptr, 0}).ok());
}

TEST(LinearAddValidation, OnlyTheReferencePrefersItOnTheHost) {
  const std::vector<float> w(8 * 8, 1.0f);
  EXPECT_FALSE(cpu::PackLinear({w.data(), DType::kF32, 8, 8}, GemmCompute::kF32).value()->PrefersAdd(1 << 20));
  EXPECT_TRUE(ref::PackLinear({w.data(), DType::kF32, 8, 8}).value()->PrefersAdd(1));
}

}  // namespace
}  // namespace spl::kernels
