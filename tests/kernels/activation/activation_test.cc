#include "kernels/activation/activation.h"

#include <vector>

#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

class SiluMul : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(SiluMul, EqualsReference) {
  Random random(51);
  TestContext t(GetParam(), 3);
  for (int64_t width : {1, 3, 15, 16, 17, 100, 1024}) {
    const int64_t rows = 67;
    std::vector<float> gate_up = random.Normals(rows * 2 * width), want(rows * width), got(rows * width);
    for (float& x : gate_up) x *= 8;
    ASSERT_TRUE(ref::SiluMul(t.ctx, {gate_up.data(), want.data(), rows, width}).ok());
    ASSERT_TRUE(cpu::SiluMul(t.ctx, {gate_up.data(), got.data(), rows, width}).ok());
    ExpectClose(got, want, DType::kF32, "width " + std::to_string(width));
    std::vector<float> row(width);
    ASSERT_TRUE(cpu::SiluMul(t.ctx, {gate_up.data() + 66 * 2 * width, row.data(), 1, width}).ok());
    EXPECT_TRUE(BitwiseEqual(row, std::span(got).last(width)));
  }
}

TEST_P(SiluMul, ExtremeGatesStayFinite) {
  TestContext t(GetParam());
  const float gates[] = {-1e30f, -1000, -104, -88, -20, -0.0f, 0, 1e-30f, 20, 88, 1000, 1e30f};
  for (float gate : gates) {
    const float gate_up[] = {gate, 1.0f};
    float want, got;
    ASSERT_TRUE(ref::SiluMul(t.ctx, {gate_up, &want, 1, 1}).ok());
    ASSERT_TRUE(cpu::SiluMul(t.ctx, {gate_up, &got, 1, 1}).ok());
    EXPECT_NEAR(got, want, 1e-6 * std::abs(want) + 1e-7) << gate;
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, SiluMul, ::testing::ValuesIn(MachineIsas()), IsaParam);

TEST(SiluMulValidation, RefusesWhatItCannotRun) {
  TestContext t(CpuIsa::kPortable);
  std::vector<float> x(16), out(8);
  for (const SiluMulArgs& a : {SiluMulArgs{x.data(), out.data(), -1, 8}, SiluMulArgs{x.data(), out.data(), 1, 0},
                               SiluMulArgs{nullptr, out.data(), 1, 8}, SiluMulArgs{x.data(), nullptr, 1, 8}}) {
    EXPECT_EQ(cpu::SiluMul(t.ctx, a).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ref::SiluMul(t.ctx, a).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(cpu::SiluMul(t.ctx, {nullptr, nullptr, 0, 8}).ok());
}

}  // namespace
}  // namespace spl::kernels
