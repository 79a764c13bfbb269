#include "kernels/selection/h2o/heavy_hitters.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>

#include "tests/kernels/support/hitting_batch.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Op = absl::Status (*)(const KernelContext&, const HeavyHittersArgs&);

class HeavyHittersTest : public ::testing::TestWithParam<CpuIsa> {
 protected:
  std::vector<std::pair<const char*, Op>> ops() const {
    return {{"ref", ref::HeavyHitters}, {"cpu", cpu::HeavyHitters}};
  }
};

// Lists, attention and evictions of many steps. An H2O that keeps what the prompt chose has other lists from the first
// eviction on, and one that does not count what steps pay has them once a generated position outlives one of the
// prompt, which the test asserts.
TEST_P(HeavyHittersTest, EvictsTheLeastOfWhatAllStepsPaid) {
  TestContext t(GetParam());
  for (const SelectingShape& shape : kShapesOfAllTypes) {
    for (const auto& [name, op] : ops()) {
      const uint64_t seed = 4100 + static_cast<uint64_t>(shape.head_dim);
      SCOPED_TRACE(std::string(name) + ", head_dim " + std::to_string(shape.head_dim) + ", seed " +
                   std::to_string(seed));
      Random random(seed);
      HittingBatch batch(random, shape, {{40, 16}, {90, 32}, {200, 32}}, 60);
      for (int32_t step = 0; step < 60; ++step) {
        batch.NextStep(random);
        HittingCall call(batch);
        const absl::Status status = op(t.ctx, call.args);
        ASSERT_TRUE(status.ok()) << status;
        for (size_t stream = 0; stream < batch.num_streams(); ++stream)
          ASSERT_TRUE(batch.Agrees(stream, call.list(stream), call.attention(stream))) << "step " << step;
      }
      EXPECT_TRUE(batch.HasChanged());
    }
  }
}

// Within the budget nothing leaves.
TEST_P(HeavyHittersTest, NothingLeavesABudgetBeyondTheContext) {
  TestContext t(GetParam());
  for (const auto& [name, op] : ops()) {
    SCOPED_TRACE(name);
    Random random(4200);
    HittingBatch batch(random, {2, 4, 64, 16, DType::kBF16}, {{20, 64}}, 30);
    for (int32_t step = 0; step < 30; ++step) {
      batch.NextStep(random);
      HittingCall call(batch);
      ASSERT_TRUE(op(t.ctx, call.args).ok());
      std::vector<int32_t> all(static_cast<size_t>(batch.sequence(0).kv_len));
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(call.list(1), all);
      ASSERT_TRUE(batch.Agrees(1, call.list(1), call.attention(1)));
    }
    // Each of the group's heads pays one in every step, and paid as much in one row of the prompt.
    double sum = 0;
    for (const double paid : batch.attention(1)) sum += paid;
    EXPECT_NEAR(sum, 4 * 31, 1e-3);
  }
}

// The last of equal ones leaves, the recent ones never do, and NaN counts as nothing.
TEST_P(HeavyHittersTest, TiesAndRecentOnes) {
  TestContext t(GetParam());
  for (const auto& [name, op] : ops()) {
    SCOPED_TRACE(name);
    Random random(4300);
    HittingBatch batch(random, {1, 1, 64, 16, DType::kF32}, {{30, 8}}, 4);
    const std::vector<int32_t> kept = {2, 5, 7, 11, 26, 27, 28, 29};
    batch.SetKept(0, kept, {9, 5, 5, 5, 8, 0, 0, 0});
    batch.SilenceQueries();  // every position is paid the same
    batch.NextStep(random);
    HittingCall first(batch);
    ASSERT_TRUE(op(t.ctx, first.args).ok());
    EXPECT_THAT(first.list(0), ElementsAre(2, 5, 7, 11, 26, 27, 28, 29, 30));
    EXPECT_THAT(batch.kept(0), ElementsAre(2, 5, 7, 26, 27, 28, 29, 30)) << "11 is the last of three equal ones";
    batch.SetKept(0, batch.kept(0), {NAN, 5, 7, 1, 1, 1, 1, 1});
    batch.NextStep(random);
    HittingCall second(batch);
    ASSERT_TRUE(op(t.ctx, second.args).ok());
    EXPECT_THAT(batch.kept(0), ElementsAre(5, 7, 26, 27, 28, 29, 30, 31));
  }
}

TEST_P(HeavyHittersTest, BadArgumentsAreNamed) {
  TestContext t(GetParam());
  for (const auto& [name, op] : ops()) {
    const auto error = [&, op = op](const std::function<void(HittingBatch&, HittingCall&)>& change) {
      Random random(5);
      HittingBatch batch(random, {1, 2, 64, 16, DType::kF32}, {{30, 8}}, 4);
      HittingCall call(batch);
      change(batch, call);
      const absl::Status status = op(t.ctx, call.args);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      return std::string(status.message());
    };
    EXPECT_THAT(error([](auto&, HittingCall& c) { c.views[0].budget = 0; }), HasSubstr("budget 0"));
    EXPECT_THAT(error([](auto&, HittingCall& c) { c.views[0].recent = 9; }), HasSubstr("recent 9"));
    EXPECT_THAT(error([](auto&, HittingCall& c) { c.args.lists.stride = 8; }), HasSubstr("of 9"));
    EXPECT_THAT(error([](auto&, HittingCall& c) { c.args.attention_stride = 8; }), HasSubstr("of 9"));
    EXPECT_THAT(error([](auto&, HittingCall& c) { c.args.attention = nullptr; }), HasSubstr("null"));
    EXPECT_THAT(error([](HittingBatch& b, auto&) {
                  b.SetKept(0, {3, 4, 5, 6, 7, 8, 9, 10, 11}, std::vector(9, 0.0f));
                }),
                HasSubstr("keeps 9 positions"));
    EXPECT_THAT(error([](HittingBatch& b, auto&) {
                  b.SetKept(0, {3, 4, 4}, {0, 0, 0});
                }),
                HasSubstr("keeps position 4 behind 4"));
    EXPECT_THAT(error([](HittingBatch& b, auto&) {
                  b.SetKept(0, {3, 29}, {0, 0});
                }),
                HasSubstr("keeps position 29 behind 29"));
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, HeavyHittersTest, ::testing::ValuesIn(MachineIsas()), IsaParam);

}  // namespace
}  // namespace spl::kernels
