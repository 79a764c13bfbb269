#include "kernels/norm/norm.h"

#include <vector>

#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

struct Problem {
  Problem(Random& random, int64_t rows, int64_t width)
      : rows(rows), width(width), residual(random.Normals(rows * width)), delta(random.Normals(rows * width)),
        weight(random.Normals(width)) {}

  // Changes `residual_copy`, gives `out`.
  template <typename Op>
  std::vector<float> Run(const Op& op, const KernelContext& ctx, bool with_delta, std::vector<float>& residual_copy,
                         int64_t begin = 0, int64_t end = -1) const {
    residual_copy = residual;
    end = end < 0 ? rows : end;
    std::vector<float> out(rows * width, -7.0f);
    RmsNormArgs a;
    a.residual = residual_copy.data() + begin * width;
    a.delta = with_delta ? delta.data() + begin * width : nullptr;
    a.weight = weight.data();
    a.out = out.data() + begin * width;
    a.num_rows = end - begin;
    a.width = width;
    a.eps = 1e-5f;
    const absl::Status s = op(ctx, a);
    EXPECT_TRUE(s.ok()) << s;
    return out;
  }

  int64_t rows, width;
  std::vector<float> residual, delta, weight;
};

class RmsNorm : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(RmsNorm, EqualsReference) {
  Random random(41);
  TestContext t(GetParam());
  for (int64_t width : {1, 3, 15, 16, 17, 63, 64, 65, 384, 1000, 4096}) {
    const Problem p(random, width < 100 ? 200 : 37, width);
    for (bool with_delta : {false, true}) {
      std::vector<float> r_want, r_got;
      const std::vector<float> want = p.Run(ref::RmsNorm, t.ctx, with_delta, r_want);
      const std::vector<float> got = p.Run(cpu::RmsNorm, t.ctx, with_delta, r_got);
      ExpectClose(got, want, DType::kF32, "width " + std::to_string(width));
      EXPECT_TRUE(BitwiseEqual(r_got, r_want)) << "the residual is a plain sum";
    }
  }
}

TEST_P(RmsNorm, RowsAndThreadsChangeNoBit) {
  Random random(42);
  TestContext one(GetParam(), 1), four(GetParam(), 4);
  const Problem p(random, 300, 390);
  std::vector<float> r, r1;
  const std::vector<float> all = p.Run(cpu::RmsNorm, four.ctx, true, r);
  EXPECT_TRUE(BitwiseEqual(p.Run(cpu::RmsNorm, one.ctx, true, r1), all));
  for (int64_t row : {0, 1, 150, 299}) {
    const std::vector<float> alone = p.Run(cpu::RmsNorm, four.ctx, true, r1, row, row + 1);
    EXPECT_TRUE(BitwiseEqual(std::span(alone).subspan(row * 390, 390), std::span(all).subspan(row * 390, 390)));
  }
}

TEST_P(RmsNorm, AZeroRowStaysZero) {
  TestContext t(GetParam());
  std::vector<float> residual(20, 0.0f), weight(20, 3.0f), out(20, -7.0f);
  ASSERT_TRUE(cpu::RmsNorm(t.ctx, {residual.data(), nullptr, weight.data(), out.data(), 1, 20, 1e-5f}).ok());
  EXPECT_EQ(out, std::vector<float>(20, 0.0f));
}

INSTANTIATE_TEST_SUITE_P(Cpu, RmsNorm, ::testing::ValuesIn(MachineIsas()), IsaParam);

TEST(RmsNormValidation, RefusesWhatItCannotRun) {
  TestContext t(CpuIsa::kPortable);
  std::vector<float> x(8), w(8), out(8);
  const RmsNormArgs good{x.data(), nullptr, w.data(), out.data(), 1, 8, 1e-5f};
  EXPECT_TRUE(cpu::RmsNorm(t.ctx, good).ok());
  const auto refused = [&](const auto& change) {
    RmsNormArgs a = good;
    change(a);
    return cpu::RmsNorm(t.ctx, a).code() == absl::StatusCode::kInvalidArgument &&
           ref::RmsNorm(t.ctx, a).code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([](RmsNormArgs& a) { a.num_rows = -1; }));
  EXPECT_TRUE(refused([](RmsNormArgs& a) { a.width = 0; }));
  EXPECT_TRUE(refused([](RmsNormArgs& a) { a.weight = nullptr; }));
  EXPECT_TRUE(refused([](RmsNormArgs& a) { a.out = a.residual; }));
  EXPECT_TRUE(refused([](RmsNormArgs& a) { a.eps = -1; }));
}

}  // namespace
}  // namespace spl::kernels
