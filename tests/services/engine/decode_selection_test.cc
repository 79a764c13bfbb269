// Decoding with chosen tokens through the engine: when choices begin, that what a sequence keeps for them and who
// decodes beside it changes nothing, and that all of it is given back. What is chosen is for the kernels' tests.
#include "services/engine/model/token_choices.h"
#include "services/engine/selection/quest.h"
#include "services/engine/selection/sparcas.h"
#include "services/engine/selection/streaming.h"
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;
using testing::HasSubstr;

DecodeOptions Selector(const char* name, int32_t budget) {
  DecodeOptions options(name);
  options.budget = budget;
  options.recent = 16;
  options.refresh_interval = 5;
  return options;
}

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

// Choices begin behind twice the budget: a context that stays below is decoded as without.
TEST_F(DecodeSelectionTest, ShortContextsAreDense) {
  std::mt19937 random = SeededRandom("short contexts");
  const auto prompt = RandomPrompt(random, 300);
  const Answer dense = Local(prompt, "dense", 40);
  EXPECT_EQ(Local(prompt, Selector("sparcas", 170), 40), dense);
  EXPECT_EQ(Local(prompt, Selector("quest", 176), 40), dense);
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
                                          Selector("loopserve", 100)};
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

TEST_F(DecodeSelectionTest, ForksChooseEachForItself) {
  std::mt19937 random = SeededRandom("forks");
  const auto prompt = RandomPrompt(random, 500);
  SamplingParams sampling = WithLogprobs(40);
  sampling.temperature = 1;
  sampling.seed = 5;
  sampling.num_forks = 3;
  LocalGeneratorOptions options;
  options.max_tokens = 4096;
  options.decode = Selector("sparcas", 64);
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
    auto compact = MakeCompactPages(*selector, *model_, *decode_pool_);
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
  const Answer chosen = Local(prompt, Selector("sparcas", 64), 50, classes_of(0.5));
  EXPECT_NE(chosen, windows);
  EXPECT_EQ(Local(prompt, Selector("sparcas", 400), 50, classes_of(0.5)), windows) << "short enough for everything";
  EXPECT_EQ(Local(prompt, Selector("sparcas", 64), 50, classes_of(0)), Local(prompt, "head_classes", 50, classes_of(0)))
      << "no head that could choose";
}

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
        EXPECT_LE(step - last[static_cast<size_t>(layer)], interval) << layer;
        last[static_cast<size_t>(layer)] = step;
      }
      if (step == 0) continue;
      EXPECT_LE(refreshed, (12 + interval - 1) / interval) << "step " << step;
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
  const absl::Status unknown = MakeTokenSelector("other", config, nullptr).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("dense, head_classes, sparcas, loopserve, quest, streaming"));
}

}  // namespace
}  // namespace spl::engine
