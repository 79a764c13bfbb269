// FusedLinear on the host against its operations one after the other.
#include "kernels/fused_linear/fused_linear.h"

#include <memory>
#include <vector>

#include "kernels/activation/activation.h"
#include "kernels/backend/backend.h"
#include "kernels/norm/norm.h"
#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

class FusedLinear : public ::testing::TestWithParam<bool> {  // the reference
 protected:
  static constexpr int64_t kRows = 3, kIn = 40, kOut = 26;

  FusedLinear()
      : backend_(GetParam() ? MakeReferenceBackend() : MakeCpuBackend()),
        x_(random_.Normals(kRows * kIn)),
        norm_(random_.Normals(kIn)),
        w_(random_.Normals(kOut * kIn)),
        bias_(random_.Normals(kOut)),
        y_(random_.Normals(kRows * kOut)),
        weight_(*backend_->PackLinear({.data = w_.data(), .out_features = kOut, .in_features = kIn})) {}

  LinearArgs Args(const float* x, float* y) const {
    return {.x = x, .weight = weight_.get(), .bias = bias_.data(), .y = y, .num_rows = kRows};
  }
  std::vector<float> Product(bool with_norm) {
    std::vector<float> normed(x_.size()), y(kRows * kOut);
    const RmsNormArgs norm{
        .residual = x_.data(), .weight = norm_.data(), .out = normed.data(), .num_rows = kRows, .width = kIn};
    ExpectOk(backend_->RmsNorm(t_.ctx, norm));
    ExpectOk(backend_->Linear(t_.ctx, Args(with_norm ? normed.data() : x_.data(), y.data())));
    return y;
  }

  Random random_{44};
  TestContext t_{DetectCpuIsa()};
  const std::unique_ptr<Backend> backend_;
  std::vector<float> x_, norm_, w_, bias_, y_;
  const std::unique_ptr<LinearWeight> weight_;
};

TEST_P(FusedLinear, IsItsOperationsOneAfterTheOther) {
  const std::vector<float> x = x_;
  for (const bool with_norm : {false, true}) {
    const InputNorm norm{with_norm ? norm_.data() : nullptr};
    const std::vector<float> product = Product(with_norm);
    std::vector<float> got(kRows * kOut), want(kRows * kOut / 2);
    ExpectOk(backend_->FusedLinear(t_.ctx, {Args(x_.data(), got.data()), {.norm = norm}}));
    EXPECT_TRUE(BitwiseEqual(got, product));

    std::vector<float> sum = y_;
    ExpectOk(backend_->FusedLinear(t_.ctx, {Args(x_.data(), sum.data()), {.norm = norm, .adds = true}}));
    for (size_t i = 0; i < sum.size(); ++i) EXPECT_EQ(sum[i], y_[i] + product[i]);

    got.assign(kRows * kOut, -7.0f);
    ExpectOk(backend_->FusedLinear(t_.ctx, {Args(x_.data(), got.data()), {.norm = norm, .silu_mul = true}}));
    ExpectOk(backend_->SiluMul(t_.ctx,
                               {.gate_up = product.data(), .out = want.data(), .num_rows = kRows, .width = kOut / 2}));
    EXPECT_TRUE(BitwiseEqual(std::span(got).first(want.size()), want));
    for (size_t i = want.size(); i < got.size(); ++i) EXPECT_EQ(got[i], -7.0f) << "written past the last row";
  }
  EXPECT_TRUE(BitwiseEqual(x_, x)) << "x is not changed";
}

TEST_P(FusedLinear, RefusesWhatMakesNoSense) {
  std::vector<float> y = y_;
  const auto code = [&](const FusedLinearArgs& a) { return backend_->FusedLinear(t_.ctx, a).code(); };
  const LinearArgs args = Args(x_.data(), y.data());
  EXPECT_EQ(code({args, {.silu_mul = true, .adds = true}}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({args, {.norm = {norm_.data(), -1.0f}}}), absl::StatusCode::kInvalidArgument);
  LinearArgs rounded = args;
  rounded.x = ConstActivations(x_.data(), DType::kBF16);
  EXPECT_EQ(code({rounded, {.norm = {norm_.data()}}}), absl::StatusCode::kInvalidArgument);
  const std::vector<float> odd = random_.Normals(3 * kIn);
  const auto weight = *backend_->PackLinear({.data = odd.data(), .out_features = 3, .in_features = kIn});
  LinearArgs of_odd = args;
  of_odd.weight = weight.get();
  EXPECT_EQ(code({of_odd, {.silu_mul = true}}), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(BitwiseEqual(y, y_));
  LinearArgs nothing = args;
  nothing.num_rows = 0;
  EXPECT_EQ(code({nothing, {.norm = {norm_.data()}, .adds = true}}), absl::StatusCode::kOk);
}

INSTANTIATE_TEST_SUITE_P(Backends, FusedLinear, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Reference" : "Cpu"; });

}  // namespace
}  // namespace spl::kernels
