// Rows of running sequences that share a pass with slices of prompts: each row's logits are those of a step of its own,
// and each prompt's those of a pass of its own, bit for bit.
#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <random>

#include "services/engine/engine.h"
#include "services/engine/recovery/exact.h"
#include "services/engine/selection/dense.h"
#include "tests/support/engine_devices.h"
#include "tests/support/paths.h"

namespace spl::engine {
namespace {

constexpr int32_t kMaxRows = 256;

class SharedPassTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (test::OnGpu() && GetParam() > 1) GTEST_SKIP() << "ranks want a GPU each";
    const auto devices = test::DevicesOf(test::OnGpu() ? "cuda" : "cpu", GetParam());
    ASSERT_TRUE(devices.ok()) << devices.status();
    auto model = Model::Load(test::kTinyModel, *devices, {.kv_dtype = test::KvType()});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
    policy_.emplace(model_->config());
    auto memory = AllocateKvMemory(*model_, 16384);
    ASSERT_TRUE(memory.ok()) << memory.status();
    memory_ = std::move(*memory);
    pool_ = std::make_unique<PagePool>(memory_->pages, model_->backends());
    auto executor = ParallelExecutor::Create(model_, memory_->pages, {.max_rows = kMaxRows, .max_sequences = 32});
    ASSERT_TRUE(executor.ok()) << executor.status();
    executor_ = std::move(*executor);
  }

  // A sequence that has read `length` random tokens.
  std::unique_ptr<SequenceKv> Read(std::mt19937& random, int32_t length) {
    auto kv = std::make_unique<SequenceKv>(*pool_, KvShapeOf(model_->config()));
    EXPECT_TRUE(kv->Reserve(length + 1).ok());
    const std::vector<int32_t> tokens = test::RandomTokens(random, length);
    for (int32_t begin = 0; begin < length; begin += kMaxRows) {
      const int32_t end = std::min(length, begin + kMaxRows);
      Run({Slice(tokens, begin, end, *kv)}, {});
      kv->set_num_tokens(end);
    }
    return kv;
  }
  PrefillSlice Slice(const std::vector<int32_t>& tokens, int32_t begin, int32_t end, const SequenceKv& kv) {
    positions_.push_back(std::make_unique<std::vector<int32_t>>(static_cast<size_t>(end - begin)));
    std::iota(positions_.back()->begin(), positions_.back()->end(), begin);
    return {.tokens = std::span(tokens).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
            .positions = *positions_.back(),
            .kv = &kv,
            .policy = &*policy_};
  }
  void Run(const std::vector<PrefillSlice>& slices, const std::vector<DecodeRow>& riders) {
    const absl::Status status =
        executor_->Prefill(slices, PassLayers{{0, model_->config().num_layers}}, nullptr, riders);
    ASSERT_TRUE(status.ok()) << status;
  }
  std::vector<float> LogitsOf(const std::vector<int32_t>& rows) {
    EXPECT_TRUE(executor_->ComputeLogits(rows).ok());
    const auto logits = executor_->Logits();
    EXPECT_TRUE(logits.ok()) << logits.status();
    return {logits->begin(), logits->end()};
  }

  std::shared_ptr<const Model> model_;
  std::optional<KvMemory> memory_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<ParallelExecutor> executor_;
  std::optional<ExactPolicy> policy_;
  std::vector<std::unique_ptr<std::vector<int32_t>>> positions_;
};

TEST_P(SharedPassTest, EveryRowGetsWhatItWouldGetAlone) {
  const uint32_t seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  const auto between = [&](int32_t low, int32_t high) {
    return low + static_cast<int32_t>(random() % static_cast<uint32_t>(high - low + 1));
  };
  for (int round = 0; round < 4; ++round) {
    DenseSelector selector(model_->config());
    std::vector<std::unique_ptr<SequenceKv>> running;
    std::vector<DecodeRow> riders;
    for (int i = between(1, 12); i > 0; --i) {
      running.push_back(Read(random, between(1, 700)));
      riders.push_back({test::RandomTokens(random, 1)[0], running.back().get(), &selector});
      ASSERT_TRUE(CanRide(riders.back()));
    }
    // The steps alone. The shared pass writes the same positions once more.
    std::vector<std::vector<float>> alone;
    for (const DecodeRow& row : riders) {
      ASSERT_TRUE(executor_->Decode({&row, 1}).ok());
      const auto logits = executor_->Logits();
      ASSERT_TRUE(logits.ok());
      alone.emplace_back(logits->begin(), logits->end());
    }
    struct Prompt {
      std::vector<int32_t> tokens;
      std::unique_ptr<SequenceKv> kv;
      int32_t begin = 0, end = 0;
    };
    std::vector<Prompt> prompts;
    std::vector<PrefillSlice> slices;
    int32_t room = kMaxRows - static_cast<int32_t>(riders.size());
    for (int i = between(1, 3); i > 0 && room > 0; --i) {
      Prompt prompt;
      prompt.begin = between(0, 1) * between(1, 300);
      prompt.end = prompt.begin + between(1, room);
      room -= prompt.end - prompt.begin;
      prompt.kv = Read(random, std::max(1, prompt.begin));
      prompt.begin = std::max(1, prompt.begin);
      prompt.end = std::max(prompt.end, prompt.begin + 1);
      prompt.tokens = test::RandomTokens(random, prompt.end);
      ASSERT_TRUE(prompt.kv->Reserve(prompt.end).ok());
      prompts.push_back(std::move(prompt));
    }
    for (const Prompt& prompt : prompts) {
      const PrefillSlice slice = Slice(prompt.tokens, prompt.begin, prompt.end, *prompt.kv);
      Run({slice}, {});
      alone.insert(alone.end() - static_cast<std::ptrdiff_t>(riders.size()), LogitsOf({prompt.end - prompt.begin - 1}));
      slices.push_back(slice);
    }
    Run(slices, riders);
    std::vector<int32_t> rows;
    int32_t row = 0;
    for (const PrefillSlice& slice : slices) rows.push_back((row += static_cast<int32_t>(slice.tokens.size())) - 1);
    for (size_t i = 0; i < riders.size(); ++i) rows.push_back(row++);
    const std::vector<float> shared = LogitsOf(rows);
    const auto vocab = static_cast<size_t>(model_->config().vocab_size);
    ASSERT_EQ(alone.size(), rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_TRUE(std::equal(alone[i].begin(), alone[i].end(), shared.begin() + static_cast<std::ptrdiff_t>(i * vocab)))
          << (i < slices.size() ? "prompt " : "rider ") << (i < slices.size() ? i : i - slices.size()) << " of round "
          << round;
    }
  }
}

TEST_P(SharedPassTest, MoreRowsThanFitAreRefused) {
  std::mt19937 random(1);
  const auto running = Read(random, 10), prompt = Read(random, 1);
  ASSERT_TRUE(prompt->Reserve(kMaxRows + 1).ok());
  DenseSelector selector(model_->config());
  const DecodeRow rider{7, running.get(), &selector};
  const std::vector<int32_t> tokens = test::RandomTokens(random, kMaxRows + 1);
  const PrefillSlice slice = Slice(tokens, 1, kMaxRows + 1, *prompt);
  EXPECT_EQ(executor_->Prefill({&slice, 1}, PassLayers{{0, model_->config().num_layers}}, nullptr, {&rider, 1}).code(),
            absl::StatusCode::kResourceExhausted);
}

INSTANTIATE_TEST_SUITE_P(Ranks, SharedPassTest, testing::Values(1, 2));

}  // namespace
}  // namespace spl::engine
