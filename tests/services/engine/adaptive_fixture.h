// Fixtures for the decode method `adaptive`: answers of an engine whose table of costs a test names, and single steps
// of one sequence without an engine around them.
#pragma once

#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "services/engine/methods/selection_methods.h"
#include "services/engine/recovery/exact.h"
#include "services/engine/selection/adaptive.h"
#include "services/engine/selection/dense.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {

using test::SeededRandom;

inline DecodeOptions Options(const char* name, int32_t budget) {
  DecodeOptions options(name);
  options.budget = budget;
  return options;
}

// Choosing saves half of a step from `from` positions on, in batches of `least` to 64 sequences.
inline StepCosts SavesFrom(int64_t from, int64_t least = 1) {
  StepCosts::Row row{from, {}};
  for (int64_t n = 1; n <= 64; ++n) row.points.push_back({n, 1.0, n < least ? 2.0 : 0.5, 0});
  return StepCosts({row});
}

class AdaptiveDecodingTest : public EnginesTest {
 protected:
  struct Told {
    std::vector<int32_t> tokens;
    std::vector<float> logprobs;
    DecodeChoiceReport report;
    std::vector<StepKind> kinds;
  };
  struct Watch {
    DecodeChoiceCounter counter;
    std::vector<StepKind> kinds;
  };

  void StartBy(const StepCosts& costs, bool async = false) {
    DecodeEngineOptions options;
    options.step_costs = costs;
    options.async_scheduling = async;
    Start(8192, 16384, {}, options);
  }
  std::shared_ptr<Outcome> Begin(const std::vector<int32_t>& prompt, const DecodeOptions& decode,
                                 const SamplingParams& sampling, std::shared_ptr<Watch> watch) {
    selection_ = decode;
    change_decode_ = [watch](DecodeRequest& request) {
      request.on_tokens = [watch, inner = request.on_tokens](std::span<const DecodeToken> tokens) {
        for (const DecodeToken& token : tokens) {
          watch->counter.Add(token.fork, token.step);
          watch->kinds.push_back(token.step.kind);
        }
        inner(tokens);
      };
    };
    auto outcome = Submit(prompt, sampling);
    change_decode_ = nullptr;
    return outcome;
  }
  static Told TakeAnswer(Outcome& outcome, const Watch& watch) {
    EXPECT_TRUE(outcome.Wait());
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    return {outcome.tokens[0], outcome.logprobs, watch.counter.report(), watch.kinds};
  }
  Told Answer(const std::vector<int32_t>& prompt, const DecodeOptions& decode, int64_t max_tokens) {
    const auto watch = std::make_shared<Watch>();
    return TakeAnswer(*Begin(prompt, decode, WithLogprobs(max_tokens), watch), *watch);
  }
};

// Steps of one sequence, without an engine around them.
class AdaptiveStepsTest : public EnginesTest {
 protected:
  static constexpr int32_t kLength = 400;
  void SetUp() override {
    pool_ = std::make_unique<PagePool>(MakeMemory(memory_, 8192), &model_->backend());
    auto executor = ParallelExecutor::Create(model_, pool_->view(), {.max_rows = 512});
    ASSERT_TRUE(executor.ok()) << executor.status();
    executor_ = *std::move(executor);
    std::mt19937 random = SeededRandom("steps");
    tokens_ = RandomPrompt(random, kLength + 100);
    Prefill();
  }
  void Prefill() {
    std::vector<int32_t> positions(kLength);
    std::iota(positions.begin(), positions.end(), 0);
    kv_ = std::make_unique<SequenceKv>(*pool_, KvShapeOf(model_->config()));
    ASSERT_TRUE(kv_->Reserve(kLength + 100).ok());
    ExactPolicy exact(model_->config());
    const PrefillSlice slice{
        .tokens = std::span(tokens_).first(kLength), .positions = positions, .kv = kv_.get(), .policy = &exact};
    ASSERT_TRUE(executor_->Prefill({&slice, 1}).ok());
    kv_->set_num_tokens(kLength);
  }
  struct Chooser {
    std::unique_ptr<AdaptiveSelector> selector;
    std::unique_ptr<CompactPages> compact;
  };
  Chooser Make(DecodeOptions options) {
    auto made = MakeTokenSelector(options, model_->config(), nullptr);
    EXPECT_TRUE(made.ok()) << made.status();
    Chooser chooser;
    chooser.compact = *MakeCompactPages(**made, *model_, *pool_, kLength);
    EXPECT_TRUE(chooser.compact->Reserve(kLength + 100).ok());
    chooser.selector.reset(static_cast<AdaptiveSelector*>(made->release()));
    return chooser;
  }
  // Logits of the step at `position`.
  std::vector<float> Step(Chooser& chooser, int32_t position, bool chooses) {
    chooser.selector->Decide(chooses, position + 1);
    return Run({.token = tokens_[position],
                .kv = kv_.get(),
                .selector = chooser.selector.get(),
                .compact = chooser.compact.get(),
                .at = position});
  }
  std::vector<float> Dense(int32_t position) {
    DenseSelector dense(model_->config());
    return Run({.token = tokens_[position], .kv = kv_.get(), .selector = &dense, .at = position});
  }
  std::vector<float> Run(const DecodeRow& row) {
    EXPECT_TRUE(executor_->Decode({&row, 1}).ok());
    const auto logits = executor_->Logits();
    EXPECT_TRUE(logits.ok());
    return {logits->begin(), logits->end()};
  }

  std::unique_ptr<kernels::Buffer> memory_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<ParallelExecutor> executor_;
  std::unique_ptr<SequenceKv> kv_;
  std::vector<int32_t> tokens_;
};

}  // namespace spl::engine
