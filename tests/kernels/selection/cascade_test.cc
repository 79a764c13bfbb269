// ChooseByQueryWindow in front of SelectTokens, as a cascade runs them: what the first keeps are the candidates of the
// second.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/kernels/support/cascade_batch.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

using Outer = absl::Status (*)(const KernelContext&, const QueryWindowArgs&);
using Inner = absl::Status (*)(const KernelContext&, const SelectTokensArgs&);

class CascadeTest : public ::testing::TestWithParam<CpuIsa> {};

TEST_P(CascadeTest, ChoosesAmongWhatIsKept) {
  TestContext t(GetParam());
  const std::pair<Outer, Inner> ops[] = {{ref::ChooseByQueryWindow, ref::SelectTokens},
                                         {cpu::ChooseByQueryWindow, cpu::SelectTokens}};
  const SelectingShape shapes[] = {{2, 4, 128, 16, DType::kBF16},
                                   {1, 1, 64, 16, DType::kF32},
                                   {2, 3, 64, 64, DType::kBF16},  // all dimensions
                                   {2, 2, 64, 16, DType::kE4M3}};
  for (const SelectingShape& shape : shapes) {
    for (const int32_t window : {1, 6, 16}) {
      for (const auto& [outer, inner] : ops) {
        const uint64_t seed = 5100 + static_cast<uint64_t>(window);
        SCOPED_TRACE((outer == ref::ChooseByQueryWindow ? "ref, head_dim " : "cpu, head_dim ") +
                     std::to_string(shape.head_dim) + ", window " + std::to_string(window) + ", seed " +
                     std::to_string(seed));
        Random random(seed);
        // Shorter than the budget, shorter than the candidates, and longer.
        CascadeBatch batch(random, shape, {20, 90, 300, 700}, {.window = window, .candidates = 120, .budget = 40},
                           3 * window + 8);
        for (int32_t step = 0; step < 3 * window + 8; ++step) {
          batch.NextStep(random);
          CascadeCall call(batch);
          ASSERT_TRUE(outer(t.ctx, call.OuterArgs()).ok());
          const std::vector<std::vector<int32_t>> kept = call.Lists();
          const absl::Status status = inner(t.ctx, call.InnerArgs());
          ASSERT_TRUE(status.ok()) << status;
          const std::vector<std::vector<int32_t>> chosen = call.Lists();
          for (size_t stream = 0; stream < kept.size(); ++stream)
            ASSERT_TRUE(batch.Agrees(stream, kept[stream], chosen[stream])) << "step " << step;
        }
        EXPECT_TRUE(batch.HasChosen());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, CascadeTest, ::testing::ValuesIn(MachineIsas()), IsaParam);

}  // namespace
}  // namespace spl::kernels
