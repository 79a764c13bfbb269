// Decoding with chosen tokens through the engine: when choices begin, that what a sequence keeps for them and who
// decodes beside it changes nothing, and that all of it is given back. What is chosen is for the kernels' tests.
#include <algorithm>
#include <set>

#include "kernels/backend/cuda/cuda_plugin.h"
#include "kernels/selection/loopserve/query_window.h"
#include "services/base/fault_point.h"
#include "services/engine/execution/token_choices.h"
#include "services/engine/methods/recovery_methods.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/recovery/exact.h"
#include "services/engine/runtime/prompt_replay.h"
#include "services/engine/selection/baselines/adakv.h"
#include "services/engine/selection/baselines/quest.h"
#include "services/engine/selection/baselines/snapkv.h"
#include "services/engine/selection/baselines/streaming.h"
#include "services/engine/selection/cascade.h"
#include "services/engine/selection/loopserve.h"
#include "services/engine/selection/sparcas.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/engine_devices.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;
using testing::HasSubstr;

class DecodeSelectionTest : public EnginesTest {
 protected:
  static Answer Local(const std::vector<int32_t>& prompt, const DecodeOptions& decode, int64_t max_tokens,
                      std::shared_ptr<const StreamClasses> classes = nullptr) {
    LocalGeneratorOptions options;
    options.max_tokens = 4096;
    options.decode = decode;
    options.decode_classes = std::move(classes);
    return Generate(options, prompt, WithLogprobs(max_tokens));
  }
};

// SparCas by packed keys, which the CPU serves but does not choose by itself.
DecodeOptions Packed(int32_t budget) {
  DecodeOptions options = Selector("sparcas", budget);
  options.packed_keys = true;
  options.recent = -1;
  return options;
}

// Choices begin behind twice the budget: a context that stays below is decoded as without.
TEST_F(DecodeSelectionTest, ShortContextsAreDense) {
  std::mt19937 random = SeededRandom("short contexts");
  const auto prompt = RandomPrompt(random, 300);
  const Answer dense = Local(prompt, "dense", 40);
  EXPECT_EQ(Local(prompt, Selector("sparcas", 170), 40), dense);
  EXPECT_EQ(Local(prompt, Selector("quest", 176), 40), dense);
  EXPECT_EQ(Local(prompt, Packed(170), 40), dense);
  EXPECT_NE(Local(prompt, Packed(80), 40), dense);
  // With a budget of less than a tile keys have 16 bits.
  DecodeOptions wide = Packed(48);
  wide.dims = kCompactDims;
  EXPECT_EQ(Local(prompt, Packed(48), 40), Local(prompt, wide, 40));
  wide.budget = 80;
  EXPECT_NE(Local(prompt, Packed(80), 40), Local(prompt, wide, 40));
  EXPECT_NE(Local(prompt, Selector("sparcas", 32), 40), dense);
  EXPECT_NE(Local(prompt, Selector("quest", 32), 40), dense);
}

// With the choice beginning while tokens are generated, the first ones are those of a dense step.
TEST_F(DecodeSelectionTest, ChoicesBeginInTheMiddleOfAnAnswer) {
  std::mt19937 random = SeededRandom("in the middle");
  const auto prompt = RandomPrompt(random, 300);
  const Answer dense = Local(prompt, "dense", 60);
  for (const char* name : {"sparcas", "quest"}) {
    // The step that writes position 320 is the first with 321 > 2 · 160 positions: 21 tokens come before its result.
    const Answer chosen = Local(prompt, Selector(name, 160), 60);
    EXPECT_TRUE(std::equal(dense.tokens.begin(), dense.tokens.begin() + 21, chosen.tokens.begin())) << name;
    EXPECT_TRUE(std::equal(dense.logprobs.begin(), dense.logprobs.begin() + 21 * 4, chosen.logprobs.begin())) << name;
    EXPECT_NE(chosen.logprobs, dense.logprobs) << name;
  }
}

// With every dimension kept there is nothing to refresh.
TEST_F(DecodeSelectionTest, WithAllDimensionsTheIntervalDecidesNothing) {
  std::mt19937 random = SeededRandom("all dimensions");
  const auto prompt = RandomPrompt(random, 400);
  DecodeOptions options = Selector("sparcas", 100);
  options.dims = model_->config().head_dim;
  options.refresh_interval = 1;
  const Answer every = Local(prompt, options, 50);
  for (const int32_t interval : {2, 7, 64}) {
    options.refresh_interval = interval;
    EXPECT_EQ(Local(prompt, options, 50), every) << interval;
  }
  options.dims = 8;
  EXPECT_NE(Local(prompt, options, 50), every);
}

// LoopServe 5.2: what comes before the first choice is dense, bit by bit; a budget beyond the context always is.
TEST_F(DecodeSelectionTest, LoopServeBeginsDense) {
  std::mt19937 random = SeededRandom("loopserve");
  const auto prompt = RandomPrompt(random, 400);
  const Answer dense = Local(prompt, "dense", 60);
  DecodeOptions options = Selector("loopserve", 64);
  for (const int32_t window : {4, 16}) {
    options.window = window;
    const Answer chosen = Local(prompt, options, 60);
    const auto same = static_cast<size_t>(window);  // tokens 1 .. window
    EXPECT_TRUE(std::equal(dense.tokens.begin(), dense.tokens.begin() + same, chosen.tokens.begin())) << window;
    EXPECT_TRUE(std::equal(dense.logprobs.begin(), dense.logprobs.begin() + same * 4, chosen.logprobs.begin()));
    EXPECT_FALSE(std::equal(dense.logprobs.begin() + same * 4, dense.logprobs.begin() + (same + 1) * 4,
                            chosen.logprobs.begin() + same * 4))
        << "the first choice is for the token behind them";
  }
  EXPECT_EQ(Local(prompt, Selector("loopserve", 470), 60), dense);
}

// A choice reads all keys: no step may have many of them.
TEST_F(DecodeSelectionTest, LayersOfLoopServeTakeTurnsToChoose) {
  const int32_t layers = model_->config().num_layers;
  for (const int32_t window : {1, 5, 16}) {
    DecodeOptions options = Selector("loopserve", 64);
    options.window = window;
    LoopServeSelector selector(model_->config(), nullptr, options);
    std::vector<int64_t> last(static_cast<size_t>(layers), -1);
    std::set<uint64_t> keys;
    const int64_t most = (layers - options.dense_layers + window - 1) / window;
    for (int64_t step = 1; step <= 5 * window; ++step) {
      selector.BeginStep(1000 + step);
      keys.insert(selector.plan_key());
      int64_t chosen = 0;
      for (int32_t layer = options.dense_layers; layer < layers; ++layer) {
        const kernels::LayerSelection& selection = selector.layers()[layer];
        const bool attends = selector.Select(layer, 0).rule == kernels::VisibilityRule::kSelected;
        EXPECT_EQ(attends, selection.selects) << "layer " << layer << ", step " << step;
        if (step < window) {
          EXPECT_FALSE(selection.selects);
        }
        if (step >= 2 * window - 1) {
          EXPECT_TRUE(selection.selects);
        }
        if (selection.selects && last[layer] < 0) {
          EXPECT_TRUE(selection.refresh) << "nothing was chosen before";
        }
        if (!selection.refresh) continue;
        if (last[layer] >= 0) {
          EXPECT_EQ(step - last[layer], window);
        }
        last[layer] = step;
        ++chosen;
      }
      EXPECT_LE(chosen, most) << "window " << window << ", step " << step;
    }
    EXPECT_GE(*std::min_element(last.begin() + options.dense_layers, last.end()), 4 * window);
    // Everything, then one more kind of step with each group of layers, and then always the same.
    EXPECT_EQ(keys.size(), static_cast<size_t>(std::min(layers - options.dense_layers, window)) + (window > 1 ? 1 : 0));
  }
}

// The steps of a cascade's layers: the outer choice is loopserve's; the inner one gathers all keys with
// it, and those that join between two.
TEST_F(DecodeSelectionTest, LayersOfACascadeFollowThoseOfLoopServe) {
  const int32_t layers = model_->config().num_layers;
  for (const int32_t window : {1, 5, 16}) {
    DecodeOptions options = Selector("cascade", 64);
    options.window = window;
    options.candidates = 200;
    CascadeSelector selector(model_->config(), nullptr, options);
    DecodeOptions like = options;
    like.selector = "loopserve";
    LoopServeSelector loopserve(model_->config(), nullptr, like);
    std::vector<uint8_t> written(static_cast<size_t>(layers), 0);
    for (int64_t step = 1; step <= 5 * window; ++step) {
      selector.BeginStep(1000 + step);
      loopserve.BeginStep(1000 + step);
      for (int32_t layer = options.dense_layers; layer < layers; ++layer) {
        const std::string what = fmt::format("window {}, step {}, layer {}", window, step, layer);
        const kernels::LayerSelection& outer = selector.outer()->layers[layer];
        const kernels::LayerSelection& inner = selector.layers()[layer];
        const kernels::LayerSelection& want = loopserve.layers()[layer];
        EXPECT_EQ(outer.records, want.records) << what;
        EXPECT_EQ(outer.selects, want.selects) << what;
        EXPECT_EQ(outer.refresh, want.refresh) << what;
        EXPECT_EQ(outer.compact_len, want.compact_len) << what;
        EXPECT_EQ(inner.selects, outer.selects) << what;
        EXPECT_EQ(inner.listed, outer.selects) << what;
        EXPECT_EQ(inner.first, outer.refresh) << what;
        EXPECT_GE(inner.refresh, inner.first) << what;
        EXPECT_EQ(selector.Select(layer, 0).rule, loopserve.Select(layer, 0).rule) << what;
        if (!inner.selects) continue;
        EXPECT_EQ(inner.parity, written[layer]) << what << ": the table that is valid";
        if (inner.refresh) written[layer] ^= 1;
        EXPECT_LE(inner.compact_len, 200 + window - 1) << what;
        EXPECT_EQ(inner.compact_len == 0, inner.first) << what;
      }
    }
  }
}

// The two ends of a cascade. With room for the whole context and all dimensions it chooses as sparcas does; with as
// many candidates as the budget, chosen in every step, it attends to what loopserve keeps. In between it does neither.
TEST_F(DecodeSelectionTest, CascadesEndInSparCasAndInLoopServe) {
  std::mt19937 random = SeededRandom("cascades");
  const auto prompt = RandomPrompt(random, 400);
  DecodeOptions cascade = Selector("cascade", 64), sparcas = Selector("sparcas", 64);
  cascade.dims = sparcas.dims = model_->config().head_dim;
  cascade.window = 1;
  cascade.candidates = 1000;
  const Answer chosen = Local(prompt, sparcas, 60);
  EXPECT_EQ(Local(prompt, cascade, 60), chosen);
  DecodeOptions loopserve = Selector("loopserve", 64);
  loopserve.window = 1;
  const Answer kept = Local(prompt, loopserve, 60);
  cascade.candidates = 64;
  EXPECT_EQ(Local(prompt, cascade, 60), kept);
  cascade.dims = 16;
  EXPECT_EQ(Local(prompt, cascade, 60), kept) << "there is nothing to score";
  cascade.candidates = 100;
  cascade.window = 16;
  const Answer between = Local(prompt, cascade, 60), dense = Local(prompt, "dense", 60);
  EXPECT_NE(between, chosen);
  EXPECT_NE(between, kept);
  EXPECT_TRUE(std::equal(dense.logprobs.begin(), dense.logprobs.begin() + 16 * 4, between.logprobs.begin()));
  EXPECT_FALSE(
      std::equal(dense.logprobs.begin() + 16 * 4, dense.logprobs.begin() + 17 * 4, between.logprobs.begin() + 16 * 4))
      << "the first choice is for the token behind the window";
}

TEST_F(DecodeSelectionTest, NobodyInTheBatchDecidesForAnother) {
  std::mt19937 random = SeededRandom("batch");
  std::vector<std::vector<int32_t>> prompts;
  std::vector<DecodeOptions> selectors = {"dense",
                                          Selector("sparcas", 64),
                                          Selector("quest", 64),
                                          Selector("streaming", 64),
                                          Selector("sparcas", 200),
                                          Selector("sparcas", 48),
                                          Selector("loopserve", 64),
                                          Selector("loopserve", 100),
                                          Selector("snapkv", 64),
                                          Selector("adakv", 100),
                                          Selector("snapkv", 500),
                                          Selector("h2o", 80),
                                          Selector("h2o", 300),
                                          Selector("cascade", 40),
                                          Selector("cascade", 64),
                                          Packed(100),
                                          Packed(130)};
  selectors[5].dims = 8;
  std::vector<Answer> alone;
  for (const DecodeOptions& selector : selectors) {
    prompts.push_back(RandomPrompt(random, 150 + random() % 400));
    alone.push_back(Local(prompts.back(), selector, 60));
  }
  Start(8192, 16384);
  const int64_t free = decode_pool_->num_free();
  std::vector<std::shared_ptr<Outcome>> outcomes;
  for (size_t i = 0; i < prompts.size(); ++i) {
    selection_ = selectors[i];
    outcomes.push_back(Submit(prompts[i], WithLogprobs(60)));
  }
  for (size_t i = 0; i < outcomes.size(); ++i) {
    ASSERT_TRUE(outcomes[i]->Wait());
    ASSERT_TRUE(outcomes[i]->status.ok()) << outcomes[i]->status;
    EXPECT_EQ(outcomes[i]->tokens[0], alone[i].tokens) << selectors[i].selector << " " << i;
  }
  EXPECT_EQ(decode_pool_->num_free(), free);
  decode_pool_->CheckInvariants();
}

// Sequences that choose in different layers or ways share a step, and read the weights once: none changes a token of
// another, and there are as many steps as the longest answer has.
TEST_F(DecodeSelectionTest, OtherOptionsDoNotCostAStep) {
  std::mt19937 random = SeededRandom("one step for all");
  constexpr int64_t kTokens = 40;
  std::vector<std::vector<DecodeOptions>> batches;
  for (const char* name : {"sparcas", "quest", "loopserve", "cascade"}) {
    batches.emplace_back();
    for (const int32_t dense_layers : {0, 2, 5, 11}) {
      batches.back().push_back(Selector(name, 64));
      batches.back().back().dense_layers = dense_layers;
    }
  }
  batches.push_back({"dense", Selector("quest", 64), Selector("streaming", 64), Selector("snapkv", 64)});
  for (const int32_t dims : {4, 8, 16}) {
    batches.back().push_back(Selector("sparcas", 64));
    batches.back().back().dims = dims;
  }
  for (const int32_t window : {3, 16, 40}) {
    batches.back().push_back(Selector("loopserve", 64));
    batches.back().back().window = window;
  }
  for (const std::vector<DecodeOptions>& options : batches) {
    std::vector<std::vector<int32_t>> prompts;
    std::vector<Answer> alone;
    for (const DecodeOptions& own : options) {
      prompts.push_back(RandomPrompt(random, 200 + random() % 100));
      alone.push_back(Local(prompts.back(), own, kTokens));
    }
    Start(8192, 16384);
    ScopedFaults disarm;
    const std::string all_are_there = fmt::format("all of batch {}", &options - batches.data());
    ASSERT_TRUE(ArmFault("engine.decode_step", {.kind = FaultKind::kDelayUntil, .event = all_are_there}).ok());
    std::vector<std::shared_ptr<Outcome>> outcomes;
    for (size_t i = 0; i < prompts.size(); ++i) {
      selection_ = options[i];
      outcomes.push_back(Submit(prompts[i], WithLogprobs(kTokens)));
    }
    ASSERT_TRUE(test::Eventually([&] { return decode_->load().running + decode_->load().waiting == prompts.size(); }));
    FireFaultEvent(all_are_there);
    for (size_t i = 0; i < outcomes.size(); ++i) {
      ASSERT_TRUE(outcomes[i]->Wait());
      ASSERT_TRUE(outcomes[i]->status.ok()) << outcomes[i]->status;
      EXPECT_EQ(outcomes[i]->tokens[0], alone[i].tokens) << options[i].selector << " " << i;
    }
    // The first one's first step began before the others were there.
    EXPECT_LE(FaultHits("engine.decode_step"), static_cast<uint64_t>(kTokens)) << options[0].selector;
  }
}

TEST_F(DecodeSelectionTest, ForksChooseEachForItself) {
  std::mt19937 random = SeededRandom("forks");
  const auto prompt = RandomPrompt(random, 500);
  SamplingParams sampling = WithLogprobs(40);
  sampling.temperature = 8;  // behind some prompts of random tokens the model is sure of one token for ever
  sampling.seed = 5;
  sampling.num_forks = 3;
  LocalGeneratorOptions options;
  options.max_tokens = 4096;
  for (const char* name : {"sparcas", "cascade", "snapkv", "adakv", "h2o"}) {
    options.decode = Selector(name, 64);
    auto generator = *LocalGenerator::Create(model_, options);
    std::vector<std::vector<int32_t>> want(3);
    ASSERT_TRUE(generator
                    ->Generate(prompt, sampling,
                               [&](int32_t fork, const SampledToken& t) {
                                 want[static_cast<size_t>(fork)].push_back(t.token);
                                 return true;
                               })
                    .ok());
    Start();
    const int64_t free = decode_pool_->num_free();
    selection_ = options.decode;
    const auto outcome = Submit(prompt, sampling);
    ASSERT_TRUE(outcome->Wait());
    ASSERT_TRUE(outcome->status.ok()) << outcome->status;
    EXPECT_EQ(outcome->tokens, want);
    EXPECT_NE(want[0], want[1]);
    EXPECT_EQ(decode_pool_->num_free(), free);
  }
}

// A recorded step holds the strides of lists and scores: steps that differ in them must not share a recording.
TEST_F(DecodeSelectionTest, KeysOfStepsTellStridesApart) {
  Start();
  const kernels::KvPoolView pool = decode_pool_->view().rank(0);
  auto session = model_->backend().NewSession({.num_threads = 1, .max_rows = 4, .max_sequences = 4});
  ASSERT_TRUE(session.ok()) << session.status();
  TokenChoices choices(*model_, 0, pool, 4, **session);
  // Of a step of one sequence, alone in it.
  const auto key = [&](const DecodeOptions& options, int64_t length) -> uint64_t {
    auto selector = *MakeTokenSelector(options, model_->config(), nullptr);
    SequenceKv kv(*decode_pool_, {model_->config().num_layers, model_->config().num_kv_heads});
    EXPECT_TRUE(kv.Reserve(length + 1).ok());
    kv.set_num_tokens(length);
    auto compact = MakeCompactPages(*selector, *model_, *decode_pool_, length);
    EXPECT_TRUE(compact.ok() && (*compact == nullptr || (*compact)->Reserve(length + 1).ok()));
    selector->BeginStep(length + 1);
    const DecodeRow row{.token = 1, .kv = &kv, .selector = selector.get(), .compact = compact->get()};
    EXPECT_TRUE(choices.Prepare({&row, 1}).ok());
    return choices.key();
  };
  const uint64_t longest = key(Selector("quest", 32), 3000);  // no memory grows behind this
  EXPECT_NE(key(Selector("quest", 32), 1000), longest);
  EXPECT_EQ(key(Selector("quest", 32), 2500), longest);
  EXPECT_NE(key(Selector("sparcas", 32), 2500), longest);
  EXPECT_NE(key(Selector("sparcas", 32), 2500), key(Selector("sparcas", 16), 2500));
  EXPECT_EQ(key(Selector("sparcas", 32), 2500), key(Selector("sparcas", 32), 1000));
  EXPECT_EQ(key("dense", 1000), 0u);
}

// What a window leaves out cannot be chosen: local heads decode as without a selector.
TEST_F(DecodeSelectionTest, LocalHeadsKeepTheirWindow) {
  std::mt19937 random = SeededRandom("local heads");
  const auto prompt = RandomPrompt(random, 700);
  const auto classes_of = [&](double global_share) {
    const HeadPreset preset{.name = "test", .global_share = global_share, .window = 96, .sinks = 16};
    return ServedClasses(HeadClassMap::Spread(model_->config().num_layers, model_->config().num_kv_heads, preset));
  };
  const Answer windows = Local(prompt, "head_classes", 50, classes_of(0.5));
  const Answer windows_of_all = Local(prompt, "head_classes", 50, classes_of(0));
  const Answer chosen = Local(prompt, Selector("sparcas", 64), 50, classes_of(0.5));
  EXPECT_NE(chosen, windows);
  EXPECT_EQ(Local(prompt, Selector("sparcas", 400), 50, classes_of(0.5)), windows) << "short enough for everything";
  EXPECT_NE(Local(prompt, Selector("cascade", 64), 50, classes_of(0.5)), windows);
  EXPECT_EQ(Local(prompt, Selector("cascade", 64), 50, classes_of(0)), windows_of_all);
  EXPECT_EQ(Local(prompt, Selector("sparcas", 64), 50, classes_of(0)), windows_of_all) << "no head that could choose";
}

// Of n positions the k of the largest scores, ties to the lower one.
std::vector<int32_t> Largest(const std::vector<double>& scores, size_t k) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
  });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

// What SnapKV, AdaKV and H2O rank positions by, in double, from the attention of a head.
std::vector<double> Ranking(const std::string& name, const std::vector<double>& attention) {
  const auto columns = static_cast<int32_t>(attention.size());
  const int32_t radius = name == "h2o" ? 0 : name == "snapkv" ? 2 : 3;
  std::vector<double> ranking;
  for (int32_t j = 0; j < columns; ++j) {
    double sum = 0, best = 0;
    for (int32_t i = std::max(0, j - radius); i <= std::min(columns - 1, j + radius); ++i) {
      sum += attention[static_cast<size_t>(i)];
      best = std::max(best, attention[static_cast<size_t>(i)]);
    }
    ranking.push_back(name == "adakv" ? best : sum);
  }
  return ranking;
}

// What they are defined to keep: `budget` positions a head, of H2O in front of the last `window`, which it keeps, too.
std::vector<std::vector<int32_t>> Kept(const std::string& name, const std::vector<std::vector<double>>& attention,
                                       int32_t budget, int32_t window = 0) {
  const auto columns = static_cast<int32_t>(attention[0].size()) - window;
  std::vector<std::vector<double>> rankings;
  std::vector<double> all;
  for (const std::vector<double>& of_head : attention) {
    rankings.push_back(Ranking(name, of_head));
    rankings.back().resize(static_cast<size_t>(columns));
    all.insert(all.end(), rankings.back().begin(), rankings.back().end());
  }
  const std::vector<int32_t> of_layer = Largest(all, static_cast<size_t>(budget) * attention.size());
  std::vector<std::vector<int32_t>> kept;
  for (size_t h = 0; h < attention.size(); ++h) {
    double count = budget;
    if (name == "adakv") {
      const auto n = std::count_if(of_layer.begin(), of_layer.end(),
                                   [&](int32_t i) { return static_cast<size_t>(i / columns) == h; });
      count = std::round(0.8 * static_cast<double>(n) + 0.2 * budget);
    }
    kept.push_back(Largest(rankings[h], static_cast<size_t>(count)));
    for (int32_t j = columns; j < columns + window; ++j) kept.back().push_back(j);
  }
  return kept;
}

// The choice of given attention, what budgets are, and that a larger one keeps all that a smaller one does.
TEST(PromptSelectors, KeepWhatIsDefined) {
  std::mt19937 random = SeededRandom("prompt selectors");
  ModelConfig config;
  config.num_layers = 4;
  config.num_kv_heads = 3;
  config.head_dim = 64;
  config.max_positions = 4096;
  for (const int32_t columns : {40, 200, 1500}) {
    std::vector<float> attention;
    std::vector<std::vector<double>> exact(3);
    for (size_t h = 0; h < 3; ++h) {
      for (int32_t j = 0; j < columns; ++j) {
        // Heads of different concentration.
        // Whole multiples of 1/4096, so that sums of five are exact in f32, too.
        const double x =
            std::ceil(4096 * std::pow(std::uniform_real_distribution<>(0, 1)(random), 1.0 + 4.0 * double(h))) / 4096;
        attention.push_back(static_cast<float>(x));
        exact[h].push_back(attention.back());
      }
    }
    for (const std::string name : {"snapkv", "adakv", "h2o"}) {
      std::vector<std::vector<int32_t>> smaller(3);
      for (const int32_t budget : {1, 7, columns / 4, columns / 2, columns - 1}) {
        DecodeOptions options(name);
        options.budget = name == "h2o" ? 2 * budget : budget + 8;
        options.window = 8;
        const auto selector = *MakeTokenSelector(options, config, nullptr);
        ASSERT_NE(selector->of_prompt(), nullptr);
        const auto kept = selector->of_prompt()->Keep(attention, columns);
        // H2O's columns end with its window, of half the budget.
        const int32_t window = name == "h2o" ? std::min(budget, columns) : 0;
        const int32_t chosen = std::min(budget, columns - window);
        EXPECT_EQ(kept, Kept(name, exact, chosen, window)) << name << ", budget " << budget << " of " << columns;
        size_t sum = 0;
        for (size_t h = 0; h < 3; ++h) {
          sum += kept[h].size();
          if (name != "adakv") {
            EXPECT_TRUE(std::includes(kept[h].begin(), kept[h].end(), smaller[h].begin(), smaller[h].end()));
          }
        }
        // Each of the three budgets is rounded by itself, by less than a half.
        const size_t rounding = name == "adakv" ? 1 : 0;
        EXPECT_GE(sum + rounding, size_t{3} * static_cast<size_t>(chosen + window));
        EXPECT_LE(sum, size_t{3} * static_cast<size_t>(chosen + window) + rounding);
        smaller = kept;
      }
    }
  }
}

// What rows of a text attend to, by a way of its own: they run as decode steps, which leave their queries in the
// compact pages of a `loopserve` sequence, and their attention is computed here from these and the KV.
class RecordedRows {
 public:
  // Computes the text; its last `rows` rows are recorded, at most kQueryWindowMax.
  RecordedRows(const Model& model, PagePool& pool, ParallelExecutor& executor, std::span<const int32_t> text,
               int32_t rows)
      : model_(model),
        pool_(pool),
        length_(static_cast<int32_t>(text.size())),
        rows_(rows),
        kv(pool, KvShapeOf(model.config())) {
    const ModelConfig& config = model.config();
    const auto policy = *MakeRecoveryPolicy({.policy = "exact"}, config);
    EXPECT_TRUE(kv.Reserve(length_ + 20).ok());
    std::vector<int32_t> positions(length_ - rows);
    std::iota(positions.begin(), positions.end(), 0);
    const PrefillSlice slice{
        .tokens = text.first(positions.size()), .positions = positions, .kv = &kv, .policy = policy.get()};
    if (length_ > rows) {
      EXPECT_TRUE(executor.Prefill({&slice, 1}, {.layers = {0, config.num_layers}}).ok());
    }
    kv.set_num_tokens(length_ - rows);
    DecodeOptions records("loopserve");
    records.window = rows;
    records.dense_layers = 0;
    records.budget = kBudget;
    const auto recorder = *MakeTokenSelector(records, config, nullptr);
    compact_ = *MakeCompactPages(*recorder, model, pool, kv.num_tokens());
    EXPECT_TRUE(compact_->Reserve(1).ok());
    for (int32_t j = length_ - rows; j < length_; ++j) {
      const DecodeRow row{text[static_cast<size_t>(j)], &kv, recorder.get(), compact_.get()};
      EXPECT_TRUE(executor.Decode({&row, 1}).ok());
      kv.set_num_tokens(j + 1);
    }
  }
  // Of each position what the recorded rows paid to it, over the group's heads.
  std::vector<double> Attention(int32_t layer, int32_t h) const {
    const ModelConfig& config = model_.config();
    const int32_t group = config.num_qo_heads / config.num_kv_heads, dim = config.head_dim;
    const kernels::QueryWindow layout{
        .head_dim = dim, .group = group, .window = rows_, .budget = kBudget, .page_bytes = model_.page_bytes()};
    const kernels::KvPoolView& view = pool_.view().rank(0);
    const std::vector<int32_t>& pages = compact_->tables()[static_cast<size_t>(layer * config.num_kv_heads + h)];
    const auto key = [&](int32_t j, int32_t c) -> double {
      const std::byte* page = view.k(kv.stream(layer, h)[static_cast<size_t>(j / kernels::kPageTokens)]);
      return kernels::KvElement(view, page, j % kernels::kPageTokens, c);
    };
    std::vector<double> sums(length_);
    for (int32_t slot = 0; slot < rows_; ++slot) {  // the slots are in order: each was written once
      for (int32_t g = 0; g < group; ++g) {
        const int64_t at = int64_t{slot} * group + g;
        const float* q =
            reinterpret_cast<const float*>(view.k(pages[static_cast<size_t>(at / layout.rows_per_page())])) +
            at % layout.rows_per_page() * dim;
        std::vector<double> row;
        double total = 0;
        for (int32_t j = 0; j <= length_ - rows_ + slot; ++j) {
          double dot = 0;
          for (int32_t c = 0; c < dim; ++c) dot += double{q[c]} * key(j, c);
          row.push_back(std::exp(dot / std::sqrt(double(dim))));
          total += row.back();
        }
        for (size_t j = 0; j < row.size(); ++j) sums[j] += row[j] / total;
      }
    }
    return sums;
  }

 private:
  static constexpr int32_t kBudget = 1000;
  const Model& model_;
  PagePool& pool_;
  const int32_t length_, rows_;
  std::unique_ptr<CompactPages> compact_;

 public:
  SequenceKv kv;  // of the whole text
};

class PromptSelectorTest : public DecodeSelectionTest {
 protected:
  // The last kRows rows of kLength decide.
  template <int32_t kLength, int32_t kRows>
  void Check(std::initializer_list<std::string> names);
};

TEST_F(PromptSelectorTest, KeepsWhatTheLastRowsAttendTo) { Check<300, 32>({"snapkv", "adakv"}); }
TEST_F(PromptSelectorTest, KeepsWhatAllRowsAttendTo) { Check<128, 128>({"h2o"}); }

template <int32_t kLength, int32_t kWindow>
void PromptSelectorTest::Check(std::initializer_list<std::string> names) {
  if (!model_->backend().host_memory()) GTEST_SKIP() << "it reads keys and queries where they are";
  std::mt19937 random = SeededRandom("rows that decide");
  const std::vector<int32_t> prompt = RandomPrompt(random, kLength);
  const ModelConfig& config = model_->config();
  decode_pool_ = std::make_unique<PagePool>(MakeMemory(decode_memory_, 2048));
  PagePool& pool = *decode_pool_;
  auto executor = *ParallelExecutor::Create(model_, pool.view(), {.max_rows = kLength});
  const RecordedRows recorded(*model_, pool, *executor, prompt, kWindow);
  const SequenceKv& kv = recorded.kv;
  const kernels::KvPoolView& view = pool.view().rank(0);
  const std::vector<std::byte> before(view.base, view.base + static_cast<int64_t>(decode_memory_->size()));
  for (const std::string& name : names) {
    DecodeOptions options(name);
    options.budget = 90;
    options.dense_layers = 1;
    const auto selector = *MakeTokenSelector(options, config, nullptr);
    const int32_t columns = kLength - selector->of_prompt()->window();
    const int64_t free = pool.num_free();
    const auto kept = ChooseOfPrompt(*executor, prompt, kv, *selector->of_prompt());
    ASSERT_TRUE(kept.ok()) << kept.status();
    EXPECT_EQ(pool.num_free(), free);
    for (int32_t layer = 0; layer < config.num_layers; ++layer) {
      std::vector<std::vector<double>> exact;
      for (int32_t h = 0; h < config.num_kv_heads; ++h) {
        exact.push_back(recorded.Attention(layer, h));
        exact.back().resize(static_cast<size_t>(columns));
      }
      auto want = Kept(name, exact, 90 - selector->of_prompt()->window());
      for (int32_t h = 0; h < config.num_kv_heads; ++h) {
        std::vector<int32_t>& list = want[static_cast<size_t>(h)];
        for (int32_t j = columns; j < kLength; ++j) list.push_back(j);
        if (layer == 0) list.clear();
        const std::vector<int32_t>& got = kept->positions[static_cast<size_t>(layer * config.num_kv_heads + h)];
        // A head's budget may differ by what AdaKV's pool makes equal, seven positions; and which of several positions
        // of nearly equal attention are kept by what bf16 makes of rows that run as steps and as a prompt: a head that
        // looks back by one pays all the same.
        const double lengths = std::abs(static_cast<double>(got.size()) - static_cast<double>(list.size()));
        EXPECT_LE(lengths, name == "adakv" ? 7 : 0) << name << ", layer " << layer << ", head " << h;
        if (lengths > 0) continue;
        const std::vector<double> ranking = Ranking(name, exact[static_cast<size_t>(h)]);
        const auto kept_of = [&](const std::vector<int32_t>& positions) {
          double sum = 0;
          for (const int32_t j : positions) sum += j < columns ? ranking[static_cast<size_t>(j)] : 0;
          return sum;
        };
        EXPECT_GE(kept_of(got), 0.99 * kept_of(list)) << name << ", layer " << layer << ", head " << h;
        std::vector<int32_t> both;
        std::ranges::set_intersection(got, list, std::back_inserter(both));
        EXPECT_GE(both.size(), list.size() * 8 / 10) << name << ", layer " << layer << ", head " << h;
      }
    }
    // A sequence that goes on elsewhere keeps the same, and what it has generated.
    SequenceKv longer(pool, KvShapeOf(config));
    longer.AppendLeading(kv, kLength / kernels::kPageTokens);
    ASSERT_TRUE(longer.Reserve(kLength + 7).ok());
    const int32_t last = kLength / kernels::kPageTokens;
    ASSERT_TRUE(pool.CopyPages(longer.PagesOfChunk(last), kv.PagesOfChunk(last)).ok());
    longer.set_num_tokens(kLength + 7);
    const auto resumed = ChooseOfPrompt(*executor, prompt, longer, *selector->of_prompt());
    ASSERT_TRUE(resumed.ok()) << resumed.status();
    for (size_t stream = 0; stream < kept->positions.size(); ++stream) {
      std::vector<int32_t> want = kept->positions[stream];
      const std::vector<int32_t>& got = resumed->positions[stream];
      if (name != "h2o" || want.empty()) {
        for (int32_t j = kLength; j < kLength + 7 && !want.empty(); ++j) want.push_back(j);
        EXPECT_EQ(got, want);
        continue;
      }
      // The window ends with what was generated; what it left behind is chosen from like the rest.
      ASSERT_EQ(got.size(), 90u);
      for (size_t i = 0; i < got.size(); ++i) {
        const int32_t recent = static_cast<int32_t>(i) - 45;
        if (recent >= 0) {
          EXPECT_EQ(got[i], kLength + 7 - 45 + recent);
        } else {
          EXPECT_TRUE(std::binary_search(want.begin(), want.end(), got[i])) << got[i];
        }
        EXPECT_EQ(resumed->attention[stream][i] > 0, got[i] < kLength) << "generated ones were paid nothing yet";
      }
    }
  }
  // The sequence's own pages are as they were.
  for (const int32_t page : kv.AllPages()) {
    const auto* bytes = view.k(page);
    EXPECT_EQ(std::memcmp(bytes, before.data() + (bytes - view.base), model_->page_bytes()), 0) << page;
  }
}

// H2O: steps add what they pay to what the rows of the prompt paid. Within the budget that is the attention of all
// rows, which the same text has when it is a prompt; and then one of them leaves with each step.
TEST_F(PromptSelectorTest, HeavyHittersAreThoseOfAllStepsSoFar) {
  if (!model_->backend().host_memory()) GTEST_SKIP() << "it reads what is kept where it is";
  constexpr int32_t kLength = 128, kPrompt = 90, kBudget = 120;
  std::mt19937 random = SeededRandom("heavy hitters");
  const std::vector<int32_t> text = RandomPrompt(random, kLength);
  const ModelConfig& config = model_->config();
  decode_pool_ = std::make_unique<PagePool>(MakeMemory(decode_memory_, 2048));
  PagePool& pool = *decode_pool_;
  auto executor = *ParallelExecutor::Create(model_, pool.view(), {.max_rows = kLength});
  const RecordedRows recorded(*model_, pool, *executor, std::span(text).first(kBudget), kBudget);

  const std::span<const int32_t> prompt = std::span(text).first(kPrompt);
  std::vector<int32_t> positions(kPrompt);
  std::iota(positions.begin(), positions.end(), 0);
  const auto policy = *MakeRecoveryPolicy({.policy = "exact"}, config);
  SequenceKv kv(pool, KvShapeOf(config));
  ASSERT_TRUE(kv.Reserve(kLength).ok());
  const PrefillSlice slice{.tokens = prompt, .positions = positions, .kv = &kv, .policy = policy.get()};
  ASSERT_TRUE(executor->Prefill({&slice, 1}, {.layers = {0, config.num_layers}}).ok());
  kv.set_num_tokens(kPrompt);
  DecodeOptions options("h2o");
  options.budget = kBudget;
  options.dense_layers = 1;
  const auto selector = *MakeTokenSelector(options, config, nullptr);
  const auto compact = *MakeCompactPages(*selector, *model_, pool, kPrompt);
  ASSERT_TRUE(compact->Reserve(kPrompt + 1).ok());
  const auto kept = ChooseOfPrompt(*executor, prompt, kv, *selector->of_prompt());
  ASSERT_TRUE(kept.ok()) << kept.status();
  ASSERT_TRUE(KeepPositions(*model_, pool, *kept, kPrompt, *selector->of_prompt(), *compact).ok());

  const auto word = [&](int32_t layer, int32_t h, int64_t i) {
    const int32_t page = compact->tables()[static_cast<size_t>(layer * config.num_kv_heads + h)][0];
    return reinterpret_cast<const int32_t*>(pool.view().k(page))[i];
  };
  std::set<int32_t> left;
  double worst = 0;
  for (int32_t j = kPrompt; j < kLength; ++j) {
    const DecodeRow row{text[static_cast<size_t>(j)], &kv, selector.get(), compact.get()};
    ASSERT_TRUE(executor->Decode({&row, 1}).ok());
    kv.set_num_tokens(j + 1);
    for (int32_t layer = 1; layer < config.num_layers; ++layer) {
      for (int32_t h = 0; h < config.num_kv_heads; ++h) {
        const int32_t count = word(layer, h, 0);
        ASSERT_EQ(count, std::min(j + 1, kBudget)) << "layer " << layer << ", head " << h;
        EXPECT_EQ(word(layer, h, 2 + 2 * int64_t{count - 1}), j);
        if (j + 1 == kBudget) {
          const std::vector<double> want = recorded.Attention(layer, h);
          double all = 0, apart = 0, generated = 0;
          for (int32_t i = 0; i < count; ++i) {
            ASSERT_EQ(word(layer, h, 2 + 2 * int64_t{i}), i);
            const double paid = std::bit_cast<float>(word(layer, h, 3 + 2 * int64_t{i}));
            all += want[static_cast<size_t>(i)];
            apart += std::abs(paid - want[static_cast<size_t>(i)]);
            if (i >= kPrompt) generated += paid;
          }
          // bf16 makes rows of a prompt and of steps a little different, codes of K and V up to a tenth (46 seeds).
          // Without what the steps paid it would be a quarter.
          const double most = model_->kv_dtype() == kernels::DType::kE4M3 ? 0.15 : 0.03;
          EXPECT_LT(apart, most * all) << "layer " << layer << ", head " << h;
          worst = std::max(worst, apart / all);
          EXPECT_GT(generated, 0) << "layer " << layer << ", head " << h;
        }
        std::set<int32_t> now;
        for (int32_t i = 0; i < count; ++i) now.insert(word(layer, h, 2 + 2 * int64_t{i}));
        for (int32_t i = 0; i <= j; ++i) {
          if (!now.contains(i)) left.insert(i);
        }
      }
    }
  }
  RecordProperty("apart", std::to_string(worst));
  EXPECT_GE(left.size(), size_t{kLength - kBudget}) << "in each head one has left with each step behind the budget";
  EXPECT_LT(*left.rbegin(), kLength - kBudget / 2) << "but none of the last ones";
}

// Choices are made in front of the first step; what is kept whole is decoded as without.
TEST_F(DecodeSelectionTest, PromptSelectorsOfShortPromptsAreDense) {
  std::mt19937 random = SeededRandom("short prompts");
  const auto prompt = RandomPrompt(random, 300);
  const Answer dense = Local(prompt, "dense", 80);
  for (const char* name : {"snapkv", "adakv", "h2o"}) {
    // The budget of H2O is that of prompt and answer.
    EXPECT_EQ(Local(prompt, Selector(name, std::string(name) == "h2o" ? 380 : 300), 80), dense) << name;
    const Answer chosen = Local(prompt, Selector(name, 64), 80);
    EXPECT_EQ(chosen.tokens[0], dense.tokens[0]) << "the prefill's";
    EXPECT_NE(chosen.logprobs, dense.logprobs) << name;
  }
  // The step that writes position 330 is the first with more than 330: 31 tokens come before its result.
  const Answer outgrown = Local(prompt, Selector("h2o", 330), 80);
  EXPECT_TRUE(std::equal(dense.logprobs.begin(), dense.logprobs.begin() + 31 * 4, outgrown.logprobs.begin()));
  EXPECT_NE(outgrown.logprobs, dense.logprobs);
}

// Where no layer is left to choose in, nothing is chosen, listed or kept beside the KV: the answer is the dense one.
TEST_F(DecodeSelectionTest, WithEveryLayerDenseTheAnswerIsDense) {
  std::mt19937 random = SeededRandom("every layer dense");
  const auto prompt = RandomPrompt(random, 300);
  const Answer dense = Local(prompt, "dense", 30);
  Start();
  const int64_t free = decode_pool_->num_free();
  for (const char* name : {"snapkv", "adakv", "h2o", "sparcas", "quest", "loopserve", "cascade", "streaming"}) {
    DecodeOptions options = Selector(name, 64);
    options.dense_layers = model_->config().num_layers;
    const auto selector = MakeTokenSelector(options, model_->config(), nullptr);
    ASSERT_TRUE(selector.ok()) << selector.status();
    EXPECT_EQ((*selector)->name(), "dense") << name;
    EXPECT_FALSE(CompactNeedsOf(**selector, *model_, 300).has_value()) << name;
    EXPECT_EQ(Local(prompt, options, 30), dense) << name;
    selection_ = options;
    const auto outcome = Submit(prompt, WithLogprobs(30));
    ASSERT_TRUE(outcome->Wait());
    ASSERT_TRUE(outcome->status.ok()) << name << ": " << outcome->status;
    EXPECT_EQ(outcome->tokens[0], dense.tokens) << name;
  }
  EXPECT_EQ(decode_pool_->num_free(), free);
}

// On every kind of device, and over ranks: answers within the budget are dense bit by bit, longer ones are not, and
// what is chosen does not depend on how steps were recorded before.
class DecodeDevicesTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const auto devices = test::DevicesOf(GetParam(), GetParam() == "ranks" ? 2 : 1);
    if (!devices.ok()) GTEST_SKIP() << devices.status();
    auto config = ParseModelConfig(R"({"architectures":["LlamaForCausalLM"],"hidden_size":128,"intermediate_size":256,
        "num_hidden_layers":4,"num_attention_heads":8,"num_key_value_heads":2,"head_dim":64,"vocab_size":500,
        "max_position_embeddings":4096,"rms_norm_eps":1e-5,"tie_word_embeddings":true,"eos_token_id":1,
        "torch_dtype":"bfloat16"})",
                                   "test");
    ASSERT_TRUE(config.ok()) << config.status();
    auto model = Model::LoadRandom({*config, 7}, *devices, {.kv_dtype = test::KvType()});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
  }
  Answer Run(const std::vector<int32_t>& prompt, const DecodeOptions& decode, int64_t max_tokens) {
    LocalGeneratorOptions options;
    options.max_tokens = 2048;
    options.decode = decode;
    Answer answer;
    auto generator = LocalGenerator::Create(model_, options);
    EXPECT_TRUE(generator.ok()) << generator.status();
    for (int again = 0; again < 2; ++again) {  // the second time from recordings
      Answer now;
      SamplingParams sampling;
      sampling.temperature = 0;
      sampling.max_tokens = max_tokens;
      sampling.ignore_eos = true;
      sampling.num_logprobs = 3;
      const absl::Status status = (*generator)->Generate(prompt, sampling, [&](int32_t, const SampledToken& t) {
        now.tokens.push_back(t.token);
        for (const auto& [id, logprob] : t.logprob->top) now.logprobs.push_back(logprob);
        return true;
      });
      EXPECT_TRUE(status.ok()) << status;
      if (again == 1) {
        EXPECT_EQ(now, answer) << decode.selector;
      }
      answer = now;
    }
    return answer;
  }
  std::shared_ptr<const Model> model_;
};

TEST_P(DecodeDevicesTest, BudgetsBeyondTheContextAreDense) {
  std::mt19937 random = SeededRandom("devices");
  std::vector<int32_t> prompt(700);
  for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 500);
  const Answer dense = Run(prompt, "dense", 70);
  ASSERT_EQ(dense.tokens.size(), 70u);
  for (const char* name : {"sparcas", "quest", "loopserve", "cascade", "snapkv", "adakv", "h2o"}) {
    EXPECT_EQ(Run(prompt, Selector(name, 784), 70), dense) << name;
    const Answer chosen = Run(prompt, Selector(name, 96), 70);
    EXPECT_NE(chosen.logprobs, dense.logprobs) << name;
    for (const float logprob : chosen.logprobs) ASSERT_TRUE(std::isfinite(logprob)) << name;
    if (std::string(name) != "loopserve" && std::string(name) != "cascade") continue;
    // Its first choice is for the token behind the window.
    EXPECT_TRUE(std::equal(dense.logprobs.begin(), dense.logprobs.begin() + 16 * 3, chosen.logprobs.begin()));
  }
}

// Whatever the window, a step finds the pages that were made for it: queries lie there in the type that they have.
TEST_P(DecodeDevicesTest, WindowsOfEverySizeFindTheirPages) {
  std::mt19937 random = SeededRandom("windows");
  std::vector<int32_t> prompt(420);
  for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 500);
  const Answer dense = Run(prompt, "dense", 140);
  for (const int32_t window : {1, 33, 64, 128}) {
    DecodeOptions options = Selector("loopserve", 96);
    options.window = window;
    const Answer chosen = Run(prompt, options, 140);
    ASSERT_EQ(chosen.tokens.size(), 140u) << window;
    EXPECT_TRUE(std::equal(dense.logprobs.begin(), dense.logprobs.begin() + window * 3, chosen.logprobs.begin()));
    EXPECT_NE(chosen.logprobs, dense.logprobs) << window;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, DecodeDevicesTest, testing::Values("cpu", "ranks", "cuda"),
                         [](const auto& info) { return info.param; });

TEST(SparCasSelector, RefreshesTakeTurns) {
  ModelConfig config;
  config.num_layers = 12;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  config.max_positions = 4096;
  for (const int32_t interval : {1, 3, 5, 64}) {
    DecodeOptions options("sparcas");
    options.budget = 100;
    options.recent = 8;
    options.refresh_interval = interval;
    SparCasSelector selector(config, nullptr, options);
    selector.BeginStep(200);
    EXPECT_TRUE(selector.layers().empty());
    std::vector<uint8_t> valid(12, 0);  // which table a layer's next step must read
    std::vector<int32_t> last(12, 0);
    for (int32_t step = 0; step < 200; ++step) {
      selector.BeginStep(201 + step);
      ASSERT_EQ(selector.layers().size(), 12u);
      int32_t refreshed = 0;
      for (int32_t layer = 0; layer < 12; ++layer) {
        const kernels::LayerSelection& s = selector.layers()[static_cast<size_t>(layer)];
        EXPECT_EQ(s.selects, layer >= options.dense_layers);
        if (!s.selects) continue;
        EXPECT_EQ(s.first, step == 0);
        EXPECT_EQ(s.compact_len, step == 0 ? 0 : 200 + step);
        EXPECT_EQ(s.parity, valid[static_cast<size_t>(layer)]) << "step " << step << ", layer " << layer;
        if (!s.refresh) continue;
        ++refreshed;
        valid[static_cast<size_t>(layer)] ^= 1;
        // Where the interval grows from 4 to 5, turns do not meet.
        EXPECT_LE(step - last[static_cast<size_t>(layer)], interval == 5 ? 8 : interval) << layer;
        if (step < 32) {
          EXPECT_LE(step - last[static_cast<size_t>(layer)], 4) << layer;
        }
        last[static_cast<size_t>(layer)] = step;
      }
      if (step == 0) continue;
      const int32_t now = std::min(interval, step < 32 ? 4 : step < 64 ? 8 : step < 128 ? 16 : 32);
      EXPECT_LE(refreshed, (12 + now - 1) / now) << "step " << step;
    }
  }
}

TEST(DecodeOptions, BadOnesAreNamed) {
  ModelConfig config;
  config.num_layers = 4;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  config.max_positions = 1000;
  const auto error = [&](const std::function<void(DecodeOptions&)>& change, const char* selector = "sparcas") {
    DecodeOptions options(selector);
    change(options);
    const absl::Status status = MakeTokenSelector(options, config, nullptr).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(error([](DecodeOptions& o) { o.budget = 0; }), HasSubstr("decode_budget is 0, it must be 1 to 1000"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.budget = 1001; }), HasSubstr("decode_budget is 1001"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.budget = 0; }, "streaming"), HasSubstr("decode_budget is 0"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.budget = 100; }, "quest"), HasSubstr("pages of 16 tokens"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.dims = 6; }), HasSubstr("decode_dims is 6"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.dims = 128; }), HasSubstr("decode_dims is 128"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.dense_layers = 5; }), HasSubstr("decode_dense_layers is 5"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.refresh_interval = 0; }), HasSubstr("decode_refresh_interval is 0"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.recent = 0; }), HasSubstr("decode_recent is 0"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.sinks = -1; }, "streaming"), HasSubstr("decode_sinks is -1"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.window = 0; }, "snapkv"), HasSubstr("decode_window is 0"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.budget = 32; }, "adakv"), HasSubstr("less than decode_budget, 32"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.budget = 1; }, "h2o"), HasSubstr("at least 2"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.candidates = 0; }, "cascade"), HasSubstr("decode_candidates is 0"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.budget = 100, o.candidates = 99; }, "cascade"),
              HasSubstr("decode_candidates is 99, of which decode_budget, 100, are chosen"));
  EXPECT_THAT(error([](DecodeOptions& o) { o.dims = 6; }, "cascade"), HasSubstr("decode_dims is 6"));
  const absl::Status unknown = MakeTokenSelector("other", config, nullptr).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(
      std::string(unknown.message()),
      HasSubstr("dense, head_classes, sparcas, adaptive, loopserve, cascade, quest, streaming, snapkv, adakv, h2o"));
}

}  // namespace
}  // namespace spl::engine
