// Decode steps that normalize, activate and add to the residual stream within products, against steps that do each of
// these by itself: the same logits, bit by bit. On the CPU everything is fused, on a GPU (SPLICE_BACKEND=cuda, Hopper)
// what its weights name.
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "kernels/backend/cuda/cuda_plugin.h"
#include "services/engine/engine.h"
#include "services/engine/execution/parallel_executor.h"
#include "services/engine/recovery/exact.h"
#include "services/engine/selection/dense.h"
#include "tests/support/engine_devices.h"
#include "tests/support/paths.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

class FusedStepsTest : public ::testing::TestWithParam<QuantizeTo> {
 protected:
  static constexpr int32_t kSteps = 4;  // a recorded step is replayed from the third on

  std::shared_ptr<const Model> Load(const Devices& devices) {
    auto model = Model::Load(test::kTinyModel, devices, {.quantize = GetParam()});
    EXPECT_TRUE(model.ok()) << model.status();
    return model.ok() ? *model : nullptr;
  }

  const std::mt19937 random_ = test::SeededRandom("fused steps");

  // The logits of all steps of `sequences` prompts of different lengths.
  std::vector<float> Logits(const std::shared_ptr<const Model>& model, int32_t sequences, FuseSteps fuse) {
    const ModelConfig& config = model->config();
    const auto memory = AllocateKvMemory(*model, PagesForTokens(config, 64 * 4 * sequences));
    EXPECT_TRUE(memory.ok()) << memory.status();
    PagePool pool(memory->pages, model->backends());
    auto executor = *ParallelExecutor::Create(
        model, memory->pages, {.num_threads = 2, .max_rows = 64, .max_sequences = sequences, .fuse_steps = fuse});
    std::mt19937 random = random_;  // the same prompts each time
    ExactPolicy policy(config);
    DenseSelector selector(config);
    std::vector<std::unique_ptr<SequenceKv>> kv;
    for (int32_t s = 0; s < sequences; ++s) {
      const std::vector<int32_t> prompt = test::RandomTokens(random, 20 + 5 * s);
      std::vector<int32_t> positions(prompt.size());
      std::iota(positions.begin(), positions.end(), 0);
      kv.push_back(std::make_unique<SequenceKv>(pool, KvShapeOf(config)));
      EXPECT_TRUE(kv.back()->Reserve(static_cast<int64_t>(prompt.size()) + kSteps).ok());
      const PrefillSlice slice{.tokens = prompt, .positions = positions, .kv = kv.back().get(), .policy = &policy};
      EXPECT_TRUE(executor->Prefill({&slice, 1}).ok());
      kv.back()->set_num_tokens(static_cast<int64_t>(prompt.size()));
    }
    std::vector<float> all;
    for (int32_t step = 0; step < kSteps; ++step) {
      std::vector<DecodeRow> rows;
      for (int32_t s = 0; s < sequences; ++s)
        rows.push_back({test::RandomTokens(random, 1)[0], kv[static_cast<size_t>(s)].get(), &selector});
      const absl::Status ran = executor->Decode(rows);
      EXPECT_TRUE(ran.ok()) << ran;
      const auto logits = executor->Logits();
      EXPECT_TRUE(logits.ok()) << logits.status();
      if (!ran.ok() || !logits.ok()) return {};
      all.insert(all.end(), logits->begin(), logits->end());
      for (const auto& sequence : kv) sequence->set_num_tokens(sequence->num_tokens() + 1);
    }
    return all;
  }

  void ExpectSame(const Devices& devices, FuseSteps fuse) {
    const auto model = Load(devices);
    ASSERT_NE(model, nullptr);
    for (const int32_t sequences : {1, 2, 3, 4, 5, 8, 9}) {
      const std::vector<float> want = Logits(model, sequences, FuseSteps::kNone);
      ASSERT_FALSE(want.empty());
      EXPECT_EQ(Logits(model, sequences, fuse), want) << sequences << " sequences";
    }
  }
};

TEST_P(FusedStepsTest, TheCpuGivesTheSameBits) { ExpectSame({kernels::MakeCpuBackend()}, FuseSteps::kAll); }

TEST_P(FusedStepsTest, RanksFuseNothing) {
  ExpectSame({kernels::MakeCpuBackend(), kernels::MakeCpuBackend()}, FuseSteps::kAll);
}

TEST_P(FusedStepsTest, AGpuGivesTheSameBits) {
  if (!test::OnGpu()) GTEST_SKIP() << "SPLICE_BACKEND is not cuda";
  auto cuda = kernels::MakeCudaBackend({.deterministic = false});
  ASSERT_TRUE(cuda.ok()) << cuda.status();
  ExpectSame({*std::move(cuda)}, FuseSteps::kWhereFaster);
}

INSTANTIATE_TEST_SUITE_P(Engine, FusedStepsTest,
                         ::testing::Values(QuantizeTo::kNone, QuantizeTo::kFp8, QuantizeTo::kInt4),
                         [](const auto& info) -> std::string {
                           return info.param == QuantizeTo::kNone  ? "Plain"
                                  : info.param == QuantizeTo::kFp8 ? "Fp8"
                                                                   : "Int4";
                         });

}  // namespace
}  // namespace spl::engine
