#include "kernels/embedding/embedding.h"

#include <vector>

#include "tests/kernels/support/kernel_test_util.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

class GatherRows : public ::testing::TestWithParam<CpuIsa> {};

// Widening is exact, so every variant must give the reference's bits; the table holds every kind of number.
TEST_P(GatherRows, EqualsReferenceBitForBit) {
  Random random(61);
  TestContext t(GetParam(), 3);
  for (int64_t width : {1, 7, 8, 16, 31, 384}) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      constexpr int64_t kRows = 50;
      std::vector<uint16_t> halves(kRows * width * 2);
      for (uint16_t& h : halves) {
        h = static_cast<uint16_t>(random.Int(0, 0xffff));
        // No NaN: a conversion instruction may set its quiet bit.
        if ((h & 0x7c00) == 0x7c00) h = static_cast<uint16_t>(h & ~0x4000);
        if ((h & 0x7f80) == 0x7f80) h = static_cast<uint16_t>(h & ~0x4000);
      }
      std::vector<int32_t> ids(301);
      for (int32_t& id : ids) id = random.Int(0, kRows - 1);
      std::vector<float> want(ids.size() * width), got(ids.size() * width);
      GatherRowsArgs a{halves.data(), dtype, kRows, width, ids, want.data()};
      ASSERT_TRUE(ref::GatherRows(t.ctx, a).ok());
      a.out = got.data();
      ASSERT_TRUE(cpu::GatherRows(t.ctx, a).ok());
      EXPECT_TRUE(BitwiseEqual(got, want)) << DTypeName(dtype) << " width " << width;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, GatherRows, ::testing::ValuesIn(MachineIsas()), IsaParam);

// An id below 0 names a token of the batch before.
TEST_P(GatherRows, TakesTokensOfTheBatchBefore) {
  Random random(62);
  TestContext t(GetParam(), 3);
  const std::vector<float> table = random.Normals(50 * 24);
  const std::vector<int32_t> last = {7, 49, 0, 21}, ids = {-2, 3, -1, -4, 49, -3, -2}, want = {49, 3, 7, 21, 49, 0, 49};
  std::vector<float> expected(ids.size() * 24), got(expected.size());
  ASSERT_TRUE(ref::GatherRows(t.ctx, {table.data(), DType::kF32, 50, 24, want, expected.data()}).ok());
  for (const auto gather : {ref::GatherRows, cpu::GatherRows}) {
    GatherRowsArgs a{table.data(), DType::kF32, 50, 24, ids, got.data(), true, last.data()};
    ASSERT_TRUE(gather(t.ctx, a).ok());
    EXPECT_TRUE(BitwiseEqual(got, expected));
    const std::vector<int32_t> wrong = {7, 50, 0, 21};
    a.last_tokens = wrong.data();
    EXPECT_EQ(gather(t.ctx, a).code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(GatherRowsValidation, RefusesWhatItCannotRun) {
  TestContext t(CpuIsa::kPortable);
  std::vector<float> table(12), out(8);
  const std::vector<int32_t> good = {0, 2}, high = {0, 3}, low = {-1, 0};
  const auto code = [&](const GatherRowsArgs& a) {
    EXPECT_EQ(cpu::GatherRows(t.ctx, a).code(), ref::GatherRows(t.ctx, a).code());
    return cpu::GatherRows(t.ctx, a).code();
  };
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code({table.data(), DType::kF32, 3, 4, good, out.data()}), absl::StatusCode::kOk);
  EXPECT_EQ(code({table.data(), DType::kF32, 3, 4, high, out.data()}), kInvalid);
  EXPECT_EQ(code({table.data(), DType::kF32, 3, 4, low, out.data()}), kInvalid);
  EXPECT_EQ(code({nullptr, DType::kF32, 3, 4, good, out.data()}), kInvalid);
  EXPECT_EQ(code({table.data(), DType::kF32, 3, 0, good, out.data()}), kInvalid);
  EXPECT_EQ(code({table.data(), DType::kF32, 3, 4, good, table.data()}), kInvalid);
  EXPECT_EQ(code({nullptr, DType::kF32, 0, 4, {}, nullptr}), absl::StatusCode::kOk);
}

}  // namespace
}  // namespace spl::kernels
