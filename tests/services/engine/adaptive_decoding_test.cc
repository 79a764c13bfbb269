// The decode method `adaptive` in the engine: its answers are those of dense steps where the table says so and those of
// sparcas where it says that, and it changes over within an answer. Its guard: mass_guard_test.cc.
#include <algorithm>
#include <memory>

#include "services/base/fault_point.h"
#include "services/engine/runtime/measure_step_costs.h"
#include "tests/services/engine/adaptive_fixture.h"
#include "tests/support/engine_devices.h"

namespace spl::engine {
namespace {

TEST_F(AdaptiveDecodingTest, AnswersAreThoseOfTheMethodThatTheTableNames) {
  std::mt19937 random = SeededRandom("adaptive");
  const auto prompt = RandomPrompt(random, 300);
  for (const bool async : {false, true}) {
    StartBy(StepCosts(), async);
    const int64_t free = decode_pool_->num_free();
    const Told dense = Answer(prompt, "dense", 60), sparse = Answer(prompt, Options("sparcas", 96), 60);
    EXPECT_NE(sparse.logprobs, dense.logprobs);
    EXPECT_TRUE(dense.report.empty());
    EXPECT_TRUE(sparse.report.empty()) << "nothing was left open";
    const Told never = Answer(prompt, Options("adaptive", 96), 60);
    EXPECT_EQ(never.tokens, dense.tokens);
    EXPECT_EQ(never.logprobs, dense.logprobs);
    EXPECT_EQ(never.report.dense_tokens, 59) << "the first token is prefill's";
    EXPECT_EQ(never.report.chosen_tokens, 0);
    EXPECT_EQ(never.report.changes, 0);
    StartBy(SavesFrom(1), async);
    const Told always = Answer(prompt, Options("adaptive", 96), 60);
    EXPECT_EQ(always.tokens, sparse.tokens);
    EXPECT_EQ(always.logprobs, sparse.logprobs);
    EXPECT_EQ(always.report.chosen_tokens, 59);
    EXPECT_EQ(always.report.dense_tokens, 0);
    // Below twice the budget there is nothing to choose from.
    EXPECT_EQ(Answer(prompt, Options("adaptive", 200), 60).logprobs, dense.logprobs);
    EXPECT_EQ(decode_pool_->num_free(), free);
    decode_pool_->CheckInvariants();
  }
}

// The step that writes position 329 is the first of 330 positions.
TEST_F(AdaptiveDecodingTest, ChangesOverWithinAnAnswer) {
  std::mt19937 random = SeededRandom("changes over");
  const auto prompt = RandomPrompt(random, 300);
  constexpr size_t kTokens = 80, kSame = 29;  // tokens of dense steps, behind prefill's
  std::vector<Told> answers;
  for (const bool async : {false, true}) {
    StartBy(SavesFrom(330), async);
    const Told dense = Answer(prompt, "dense", kTokens);
    answers.push_back(Answer(prompt, Options("adaptive", 96), kTokens));
    const Told& changed = answers.back();
    ASSERT_EQ(changed.tokens.size(), kTokens);
    EXPECT_EQ(changed.report.dense_tokens, kSame);
    EXPECT_EQ(changed.report.chosen_tokens, kTokens - 1 - kSame);
    EXPECT_EQ(changed.report.changes, 1);
    EXPECT_TRUE(std::equal(dense.tokens.begin(), dense.tokens.begin() + 1 + kSame, changed.tokens.begin()));
    const size_t values = dense.logprobs.size() / (kTokens - 1);
    const auto same = static_cast<std::ptrdiff_t>(kSame * values);
    EXPECT_TRUE(std::equal(dense.logprobs.begin(), dense.logprobs.begin() + same, changed.logprobs.begin()));
    EXPECT_FALSE(std::equal(dense.logprobs.begin() + same, dense.logprobs.begin() + same + values,
                            changed.logprobs.begin() + same));
  }
  EXPECT_EQ(answers[0].logprobs, answers[1].logprobs) << "whether steps wait for tokens or not";
}

// Two sequences save, one alone does not: it goes back when the other one ends, and chooses once more with a third one.
TEST_F(AdaptiveDecodingTest, GoesBackWhenTheBatchShrinks) {
  std::mt19937 random = SeededRandom("goes back");
  for (const bool async : {false, true}) {
    StartBy(SavesFrom(1, 2), async);
    const int64_t free = decode_pool_->num_free();
    const auto long_watch = std::make_shared<Watch>(), short_watch = std::make_shared<Watch>();
    SamplingParams sampling = WithLogprobs(200);
    sampling.ignore_eos = true;
    ScopedFaults disarm;
    const std::string both_are_there = async ? "both, async" : "both";
    ASSERT_TRUE(ArmFault("engine.decode_step", {.kind = FaultKind::kDelayUntil, .event = both_are_there}).ok());
    const auto long_one = Begin(RandomPrompt(random, 300), Options("adaptive", 96), sampling, long_watch);
    sampling.max_tokens = 40;
    const auto short_one = Begin(RandomPrompt(random, 250), Options("adaptive", 96), sampling, short_watch);
    ASSERT_TRUE(test::Eventually([&] { return decode_->load().running + decode_->load().waiting == 2; }));
    FireFaultEvent(both_are_there);
    const Told longer = TakeAnswer(*long_one, *long_watch), shorter = TakeAnswer(*short_one, *short_watch);
    EXPECT_EQ(longer.tokens.size(), 200u);
    EXPECT_EQ(shorter.tokens.size(), 40u);
    EXPECT_GE(shorter.report.chosen_tokens, 30) << "together they save";
    EXPECT_GE(longer.report.chosen_tokens, 30);
    EXPECT_GE(longer.report.dense_tokens, 150) << "alone it does not";
    EXPECT_EQ(longer.kinds.back(), StepKind::kDense);
    EXPECT_EQ(longer.report.dense_tokens + longer.report.chosen_tokens, 199);
    EXPECT_LE(longer.report.changes, 2);
    EXPECT_EQ(decode_pool_->num_free(), free);
  }
}

// Forks, preempted sequences and neighbours of every method: every token is delivered, and counted once.
TEST_F(AdaptiveDecodingTest, NoTokenIsLost) {
  std::mt19937 random = SeededRandom("no token is lost");
  for (const bool async : {false, true}) {
    DecodeEngineOptions options;
    options.step_costs = SavesFrom(150, 3);
    options.async_scheduling = async;
    Start(8192, 2400, {}, options);  // too small for all
    const int64_t free = decode_pool_->num_free();
    std::vector<std::shared_ptr<Outcome>> outcomes;
    std::vector<std::shared_ptr<Watch>> watches;
    std::vector<DecodeOptions> methods;
    for (int i = 0; i < 14; ++i) {
      SamplingParams sampling = Greedy(60 + static_cast<int64_t>(random() % 60));
      sampling.ignore_eos = true;
      sampling.num_forks = 1 + i % 3;
      methods.push_back(i % 4 == 3 ? Options("sparcas", 64) : Options("adaptive", 64));
      watches.push_back(std::make_shared<Watch>());
      outcomes.push_back(Begin(RandomPrompt(random, 100 + random() % 150), methods.back(), sampling, watches.back()));
    }
    int64_t chosen = 0, dense = 0;
    for (size_t i = 0; i < outcomes.size(); ++i) {
      ASSERT_TRUE(outcomes[i]->Wait());
      ASSERT_TRUE(outcomes[i]->status.ok()) << outcomes[i]->status;
      int64_t tokens = 0;
      for (const auto& of_fork : outcomes[i]->tokens) tokens += static_cast<int64_t>(of_fork.size()) - 1;
      const DecodeChoiceReport& report = watches[i]->counter.report();
      EXPECT_EQ(report.chosen_tokens + report.dense_tokens, methods[i].selector == "adaptive" ? tokens : 0) << i;
      chosen += report.chosen_tokens;
      dense += report.dense_tokens;
    }
    EXPECT_GT(chosen, 0);
    EXPECT_GT(dense, 0);
    EXPECT_EQ(decode_pool_->num_free(), free);
    decode_pool_->CheckInvariants();
  }
}

// A choice behind dense steps has the keys that they wrote: with all dimensions, and with dimensions that are chosen in
// this step, it is the choice of a sequence that begins here.
TEST_F(AdaptiveStepsTest, AChoiceBehindDenseStepsLacksNoKey) {
  DecodeOptions all_dims = Options("adaptive", 64), packed = Options("adaptive", 128);
  all_dims.recent = 8;
  all_dims.dims = model_->config().head_dim;
  packed.packed_keys = true;
  packed.refresh_interval = 32;
  for (const DecodeOptions& options : {all_dims, packed}) {
    for (const int32_t gap : {1, 40, 90}) {
      if (options.packed_keys && gap < options.refresh_interval) continue;
      Chooser with_gap = Make(options), anew = Make(options);
      int32_t position = kLength;
      for (int i = 0; i < 3; ++i) {
        Step(with_gap, position++, true);
      }
      for (int i = 0; i < gap; ++i) {
        const auto rests = Step(with_gap, position, false);
        EXPECT_EQ(Dense(position), rests) << "a step that does not choose is dense";
        ++position;
      }
      const auto behind = Step(with_gap, position, true);
      EXPECT_EQ(Step(anew, position, true), behind) << gap << (options.packed_keys ? " packed" : "");
      EXPECT_NE(Dense(position), behind);
    }
  }
}

// A step that does not choose shares a pass with slices of prompts, as a dense one does.
TEST_F(AdaptiveStepsTest, DenseStepsRide) {
  Chooser chooser = Make(Options("adaptive", 64));
  const DecodeRow row{.kv = kv_.get(), .selector = chooser.selector.get(), .compact = chooser.compact.get()};
  EXPECT_TRUE(CanRide(row));
  chooser.selector->Decide(true, kLength + 1);
  EXPECT_FALSE(CanRide(row));
  chooser.selector->Decide(false, kLength + 1);
  EXPECT_TRUE(CanRide(row));
}

// A table of this machine: plausible numbers, and the pool as it was.
TEST_F(AdaptiveStepsTest, CostsAreMeasured) {
  const int64_t free = pool_->num_free();
  const auto nothing = MeasureStepCosts(*executor_, *pool_, std::chrono::milliseconds(0));
  ASSERT_TRUE(nothing.ok()) << nothing.status();
  EXPECT_TRUE(nothing->rows().empty()) << "no time was left";
  const auto costs = MeasureStepCosts(*executor_, *pool_, std::chrono::minutes(1));
  ASSERT_TRUE(costs.ok()) << costs.status();
  EXPECT_EQ(pool_->num_free(), free);
  pool_->CheckInvariants();
  ASSERT_EQ(costs->rows().size(), 1u) << "the pool has no room for 16,384 positions";
  const StepCosts::Row& row = costs->rows()[0];
  EXPECT_EQ(row.length, 4097);
  ASSERT_EQ(row.points.size(), 1u);
  EXPECT_EQ(row.points[0].sequences, 1);
  EXPECT_GT(row.points[0].dense_s, 0);
  EXPECT_GT(row.points[0].chosen_s, 0);
  EXPECT_GE(row.points[0].change_s, 0);
  std::printf("4097 positions: dense %.2f ms, chosen %.2f, change %.2f\n", row.points[0].dense_s * 1e3,
              row.points[0].chosen_s * 1e3, row.points[0].change_s * 1e3);
}

// Pages of K and V in FP8 are filled with keys that mean something, too.
TEST_F(AdaptiveStepsTest, CostsOfFp8PagesAreMeasured) {
  const auto model = Model::Load(test::kTinyModel, *test::DevicesOf(test::OnGpu() ? "cuda" : "cpu"),
                                 {.kv_dtype = kernels::DType::kE4M3});
  ASSERT_TRUE(model.ok()) << model.status();
  const auto memory = AllocateKvMemory(**model, PagesForTokens((*model)->config(), 8192));
  ASSERT_TRUE(memory.ok()) << memory.status();
  PagePool pool(memory->pages, (*model)->backends());
  const auto executor = ParallelExecutor::Create(*model, pool.view(), {.max_rows = 64});
  ASSERT_TRUE(executor.ok()) << executor.status();
  const auto costs = MeasureStepCosts(**executor, pool, std::chrono::minutes(1));
  ASSERT_TRUE(costs.ok()) << costs.status();
  ASSERT_EQ(costs->rows().size(), 1u);
  EXPECT_GT(costs->rows()[0].points[0].chosen_s, 0);
  EXPECT_EQ(pool.num_free(), pool.num_pages());
}

}  // namespace
}  // namespace spl::engine
