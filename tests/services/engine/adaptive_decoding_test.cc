// The decode method `adaptive` in the engine: its answers are those of dense steps where the table says so and those of
// sparcas where it says that, it changes over within an answer, and a guard gives heads everything.
#include <algorithm>
#include <memory>

#include "services/base/fault_point.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/recovery/exact.h"
#include "services/engine/runtime/mass_guard.h"
#include "services/engine/runtime/measure_step_costs.h"
#include "services/engine/selection/adaptive.h"
#include "services/engine/selection/dense.h"
#include "services/engine/selection/sparcas.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/engine_devices.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;

DecodeOptions Options(const char* name, int32_t budget) {
  DecodeOptions options(name);
  options.budget = budget;
  return options;
}

// Choosing saves half of a step from `from` positions on, in batches of `least` to 64 sequences.
StepCosts SavesFrom(int64_t from, int64_t least = 1) {
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

// Every chosen head below the floor is guarded; measuring itself changes no answer.
TEST_F(AdaptiveDecodingTest, AHeadBelowTheFloorIsGuarded) {
  std::mt19937 random = SeededRandom("guard");
  const auto prompt = RandomPrompt(random, 300);
  StartBy(SavesFrom(1));
  const ModelConfig& config = model_->config();
  DecodeOptions options = Options("adaptive", 96);
  const Told unguarded = Answer(prompt, options, 60);
  EXPECT_FALSE(unguarded.report.least_mass.has_value());
  options.mass_floor = 1e-9;
  const Told measured = Answer(prompt, options, 60);
  EXPECT_EQ(measured.logprobs, unguarded.logprobs);
  EXPECT_EQ(measured.report.guarded_heads, 0);
  ASSERT_TRUE(measured.report.least_mass.has_value());
  EXPECT_GT(*measured.report.least_mass, 0);
  EXPECT_LT(*measured.report.least_mass, 1);
  options.mass_floor = 1;
  const Told guarded = Answer(prompt, options, 60);
  EXPECT_NE(guarded.logprobs, unguarded.logprobs);
  const int32_t heads = (config.num_layers - options.dense_layers) * config.num_kv_heads;
  EXPECT_GT(guarded.report.guarded_heads, heads / 2);
  EXPECT_LE(guarded.report.guarded_heads, heads);
  EXPECT_EQ(guarded.report.least_mass, measured.report.least_mass);
  EXPECT_EQ(guarded.report.chosen_tokens, 59);
}

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

// With all heads guarded a step that chooses is a dense one.
TEST_F(AdaptiveStepsTest, AGuardedHeadAttendsToEverything) {
  for (const bool packed : {false, true}) {
    DecodeOptions options = Options("adaptive", 128);
    options.packed_keys = packed;
    Chooser chooser = Make(options);
    const auto chosen = Step(chooser, kLength, true);
    EXPECT_NE(chosen, Dense(kLength));
    for (int32_t layer = 0; layer < model_->config().num_layers; ++layer) {
      for (int32_t head = 0; head < model_->config().num_kv_heads; ++head)
        chooser.selector->Guard(layer, head, kLength + 2);
    }
    const auto guarded = Step(chooser, kLength + 1, true);
    EXPECT_EQ(guarded, Dense(kLength + 1)) << packed;
    EXPECT_NE(Step(chooser, kLength + 2, true), Dense(kLength + 2)) << packed;
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
