// Methods for cold prompts in the engines: what they leave behind for others, who runs beside them, and that a trained
// model still answers.
#include <fmt/format.h>

#include "services/tokenizer/tokenizer.h"
#include "tests/services/engine/engines_fixture.h"

namespace spl::engine {
namespace {

class ColdEngineTest : public EnginesTest {
 protected:
  static std::function<void(PrefillRequest&)> With(const ReuseOptions& reuse) {
    return [reuse](PrefillRequest& r) { r.reuse = reuse; };
  }
  static ReuseOptions LoopServe(double alpha, int32_t min_span = 256) {
    return {.policy = "loopserve", .line_alpha = alpha, .line_min_span = min_span};
  }
  static Tokens Local(const std::vector<int32_t>& prompt, const ReuseOptions& reuse, int32_t max_rows) {
    auto generator = LocalGenerator::Create(
        model_, {.executor = {.max_rows = max_rows}, .max_tokens = 4096, .reuse_options = reuse});
    EXPECT_TRUE(generator.ok()) << generator.status();
    Tokens tokens(1);
    EXPECT_TRUE((*generator)
                    ->Generate(prompt, Greedy(6),
                               [&](int32_t, const SampledToken& t) {
                                 tokens[0].push_back(t.token);
                                 return true;
                               })
                    .ok());
    return tokens;
  }
};

// docs/methods/provenance.md, P1 to P3: neither the prefix index, nor the segment index, nor the store ever has any of
// it.
TEST_F(ColdEngineTest, ApproximateKvStaysWithItsRequest) {
  PrefillEngineOptions options;
  options.canonical_prefill = false;  // which would compute the segments by themselves
  auto store = std::make_shared<FakeStore>();
  options.store = store;
  Start(8192, 8192, options);
  std::mt19937 random(31);
  for (const ReuseOptions& reuse : {LoopServe(0.5), ReuseOptions{.policy = "minference", .line_columns = 64},
                                    ReuseOptions{.policy = "a-shape"}, ReuseOptions{.policy = "tri-shape"}}) {
    const auto prompt = RandomPrompt(random, 400);
    const auto mark = [](PrefillRequest& r) { r.segments = {{{100, 300}, kDocs}}; };
    const auto approximate = Ask(prompt, [&](PrefillRequest& r) {
      mark(r);
      r.reuse = reuse;
    });
    EXPECT_FALSE(approximate->stats.exact) << reuse.policy;
    EXPECT_EQ(approximate->stats.policy, reuse.policy);
    EXPECT_EQ(approximate->stats.computed_tokens, 400);
    const auto naive = Ask(prompt, [&](PrefillRequest& r) {
      mark(r);
      r.reuse.policy = "naive";
      r.publish = false;
    });
    EXPECT_EQ(naive->stats.cached_tokens + naive->stats.aligned_tokens, 0) << reuse.policy;
    EXPECT_EQ(store->size(), 0u) << reuse.policy;
  }
  // A span that is too short for lines is exact, and everybody's.
  const auto prompt = RandomPrompt(random, 400);
  const auto dense = Ask(prompt, With(LoopServe(0.5, 401)));
  EXPECT_TRUE(dense->stats.exact);
  EXPECT_EQ(dense->stats.lines.heads, 0);
  EXPECT_EQ(dense->tokens, Expected(prompt, Greedy(6)));
  EXPECT_EQ(Ask(prompt, With({.policy = "exact"}))->stats.cached_tokens, 384);
  // Behind its prefix the span is what is new.
  const auto longer = Concatenate({prompt, RandomPrompt(random, 300)});
  const auto lines = Ask(longer, With(LoopServe(0.5, 300)));
  EXPECT_EQ(lines->stats.cached_tokens, 384);
  EXPECT_GT(lines->stats.lines.heads, 0);
  EXPECT_EQ(Ask(longer, With({.policy = "exact"}))->stats.cached_tokens, 384) << "nothing of it was kept";
}

// A span that runs layer by layer and slices of other prompts take turns and change nothing for each other.
TEST_F(ColdEngineTest, OthersRunBesideASpan) {
  PrefillEngineOptions options;
  options.executor.max_rows = 128;
  options.prefix_cache = false;
  Start(16384, 16384, options);
  std::mt19937 random(32);
  std::vector<std::vector<int32_t>> prompts;
  std::vector<ReuseOptions> reuse;
  for (const size_t length : {900, 300, 1100, 200, 700, 500}) prompts.push_back(RandomPrompt(random, length));
  reuse = {LoopServe(0.6),
           {.policy = "exact"},
           {.policy = "minference", .line_columns = 100, .line_slashes = 64},
           {.policy = "exact"},
           {.policy = "a-shape", .band_sinks = 16, .band_window = 100},
           {.policy = "tri-shape", .band_sinks = 16, .band_window = 100}};
  std::vector<Tokens> alone;
  for (size_t i = 0; i < prompts.size(); ++i) {
    alone.push_back(Ask(prompts[i], With(reuse[i]))->tokens);
    EXPECT_EQ(alone[i], Local(prompts[i], reuse[i], 512)) << "first law: " << reuse[i].policy;
  }
  for (int round = 0; round < 3; ++round) {
    std::vector<std::shared_ptr<Outcome>> outcomes;
    for (size_t i = 0; i < prompts.size(); ++i)
      outcomes.push_back(
          Submit(prompts[i], Greedy(6), std::make_shared<std::atomic<bool>>(false), SteadyTime::max(), With(reuse[i])));
    for (size_t i = 0; i < prompts.size(); ++i) {
      ASSERT_TRUE(outcomes[i]->Wait());
      EXPECT_TRUE(outcomes[i]->status.ok()) << outcomes[i]->status;
      EXPECT_EQ(outcomes[i]->tokens, alone[i]) << reuse[i].policy;
    }
  }
}

TEST_F(ColdEngineTest, CancellingASpanFreesItsPages) {
  Start();
  std::mt19937 random(33);
  const int64_t before = prefill_->pool().num_free();
  auto cancelled = std::make_shared<std::atomic<bool>>(false);
  const auto outcome =
      Submit(RandomPrompt(random, 3000), Greedy(4), cancelled, SteadyTime::max(), With(LoopServe(0.9)));
  cancelled->store(true);
  prefill_->Wake();
  ASSERT_TRUE(outcome->Wait());
  EXPECT_EQ(outcome->status.code(), absl::StatusCode::kCancelled);
  prefill_->WaitIdle(std::chrono::steady_clock::now() + 20s);
  EXPECT_EQ(prefill_->pool().num_free(), before);
}

TEST_F(ColdEngineTest, BadOptionsAreRefusedOnSubmit) {
  Start();
  std::mt19937 random(34);
  ReuseOptions bad = LoopServe(2);
  const auto outcome = Submit(RandomPrompt(random, 100), Greedy(1), std::make_shared<std::atomic<bool>>(false),
                              SteadyTime::max(), With(bad));
  EXPECT_EQ(outcome->status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(outcome->status.message()), testing::HasSubstr("line_alpha is 2"));
}

// 4.5K tokens, with a fact that no window has.
TEST_F(ColdEngineTest, ATrainedModelFindsAFactThroughLines) {
  auto tokenizer = tokenizer::Tokenizer::Load(test::kTinyModel);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const char* const nouns[] = {"harbour", "lantern", "captain", "garden", "island", "window", "letter", "anchor"};
  const char* const verbs[] = {"waited for", "looked at", "spoke of", "forgot", "remembered", "walked to"};
  std::mt19937 random(35);
  const auto filler = [&](int sentences) {
    std::string text;
    for (int i = 0; i < sentences; ++i)
      text += fmt::format("The {} {} the {} and the {} {} a {}. ", nouns[random() % 8], verbs[random() % 6],
                          nouns[random() % 8], nouns[random() % 8], verbs[random() % 6], nouns[random() % 8]);
    return text;
  };
  const std::string before = filler(130), after = filler(170);
  const std::string text =
      "<|begin_of_text|><|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nSome special "
      "magic "
      "numbers are hidden within the following text. Make sure to memorize it. I will quiz you about the numbers "
      "afterwards.\n" +
      before + "One of the special magic numbers for regiments is: 6240675. " + after +
      "\nWhat is the special magic number for regiments mentioned in the provided text?<|im_end|>\n"
      "<|im_start|>assistant\n";
  const auto ids = (*tokenizer)->Encode(text, {.add_special_tokens = false, .parse_special_tokens = true});
  ASSERT_TRUE(ids.ok()) << ids.status();
  ASSERT_GE(ids->size(), 4500u);
  PrefillEngineOptions options;
  options.prefix_cache = false;
  Start(8192, 8192, options);
  const auto ask = [&](const ReuseOptions& reuse) {
    const auto outcome = Ask({ids->begin(), ids->end()}, With(reuse), 12);
    const std::vector<tokenizer::TokenId> answer(outcome->tokens[0].begin(), outcome->tokens[0].end());
    return std::pair((*tokenizer)->Decode(answer, {}).value_or(""), outcome->stats);
  };
  EXPECT_THAT(ask({.policy = "exact"}).first, testing::StartsWith("6240675"));
  const auto [answer, stats] = ask({.policy = "loopserve"});
  EXPECT_THAT(answer, testing::StartsWith("6240675"));
  EXPECT_FALSE(stats.exact);
  const int64_t heads = (model_->config().num_layers - 2) * model_->config().num_kv_heads;
  EXPECT_EQ(stats.lines.heads, heads);
  EXPECT_GE(stats.lines.covered_share(), 0.995);
  EXPECT_GT(stats.lines.held_out_share(), 0.95);
  EXPECT_LT(stats.lines.cell_share(), 1);
  fmt::print("{} tokens: {:.1f} % of the cells, {:.4f} covered, {:.4f} of held-out rows, {} of {} heads dense\n",
             ids->size(), 100 * stats.lines.cell_share(), stats.lines.covered_share(), stats.lines.held_out_share(),
             stats.lines.dense_heads, stats.lines.heads);
  // A band does not reach back to it, and the question alone cannot help in the layers below the last.
  ReuseOptions band{.policy = "a-shape", .band_window = 1024};
  EXPECT_THAT(ask(band).first, testing::Not(testing::StartsWith("6240675")));
}

}  // namespace
}  // namespace spl::engine
