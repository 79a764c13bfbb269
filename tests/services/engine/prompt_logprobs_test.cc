// Log-probabilities of a prompt's own tokens, against those of all logits of a plain run.
#include <cmath>

#include "tests/services/engine/engines_fixture.h"

namespace spl::engine {
namespace {

constexpr int32_t kNumTop = 3;

class PromptLogprobsTest : public EnginesTest {
 protected:
  std::shared_ptr<Outcome> Score(const std::vector<int32_t>& prompt,
                                 const std::function<void(PrefillRequest&)>& change = nullptr) {
    return Ask(prompt, [&](PrefillRequest& request) {
      request.prompt_logprobs = kNumTop;
      if (change) change(request);
    });
  }
  absl::Status Refused(const std::function<void(PrefillRequest&)>& change) {
    PrefillRequest request;
    request.tokens = {1, 2, 3};
    request.sampling = Greedy(1);
    request.prompt_logprobs = 0;
    change(request);
    return prefill_->Submit(std::move(request));
  }
};

using Rows = std::vector<TokenLogprob>;

void ExpectSame(const Rows& a, const Rows& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].logprob, b[i].logprob) << "behind position " << i;
    ASSERT_EQ(a[i].top, b[i].top) << "behind position " << i;
  }
}

TEST_F(PromptLogprobsTest, AreThoseOfAllLogits) {
  Start();
  std::mt19937 random(21);
  const std::vector<int32_t> prompt = RandomPrompt(random, 700);  // two slices
  const auto outcome = Score(prompt);
  auto generator = LocalGenerator::Create(model_, {.executor = {.max_rows = 512}, .max_tokens = 1024});
  ASSERT_TRUE(generator.ok()) << generator.status();
  const auto logits = (*generator)->AllLogits(prompt);
  ASSERT_TRUE(logits.ok()) << logits.status();
  const auto vocab = static_cast<size_t>(model_->config().vocab_size);
  ASSERT_EQ(outcome->prompt_logprobs.size(), prompt.size() - 1);
  for (size_t p = 0; p + 1 < prompt.size(); ++p) {
    const std::span<const float> row = std::span(*logits).subspan(p * vocab, vocab);
    const double max = *std::max_element(row.begin(), row.end());
    double sum = 0;
    for (const float x : row) sum += std::exp(static_cast<double>(x) - max);
    const auto expected = [&](int32_t token) { return static_cast<double>(row[token]) - max - std::log(sum); };
    const TokenLogprob& got = outcome->prompt_logprobs[p];
    ASSERT_NEAR(got.logprob, expected(prompt[p + 1]), 1e-4) << "behind position " << p;
    ASSERT_EQ(got.top.size(), static_cast<size_t>(kNumTop));
    EXPECT_EQ(static_cast<double>(row[got.top[0].first]), max);
    for (size_t i = 0; i < got.top.size(); ++i) {
      ASSERT_NEAR(got.top[i].second, expected(got.top[i].first), 1e-4);
      if (i > 0) {
        ASSERT_LE(got.top[i].second, got.top[i - 1].second);
      }
    }
  }
}

// Cached KV has no logits: the prompt is computed again, and what it computes is cached for others.
TEST_F(PromptLogprobsTest, NoCachedPrefixIsUsed) {
  Start();
  std::mt19937 random(22);
  const std::vector<int32_t> prompt = RandomPrompt(random, 300);
  const auto plain = Ask(prompt, nullptr);
  EXPECT_TRUE(plain->prompt_logprobs.empty()) << "nobody asked for them";
  const auto first = Score(prompt), second = Score(prompt);
  for (const auto& outcome : {first, second}) {
    EXPECT_EQ(outcome->stats.cached_tokens, 0);
    EXPECT_EQ(outcome->stats.computed_tokens, 300);
    EXPECT_EQ(outcome->tokens, plain->tokens);
    ExpectSame(outcome->prompt_logprobs, first->prompt_logprobs);
  }
  EXPECT_EQ(Ask(prompt, nullptr)->stats.cached_tokens, 256);
  const auto turn = [](PrefillRequest& request) { request.session = "s"; };
  Ask(prompt, turn);
  EXPECT_EQ(Score(prompt, turn)->stats.cached_tokens, 0);
}

// A prompt's rows do not depend on the prompts that share its passes.
TEST_F(PromptLogprobsTest, AreTheSameInCompany) {
  Start();
  std::mt19937 random(23);
  std::vector<std::vector<int32_t>> prompts;
  std::vector<Rows> alone;
  for (const int64_t length : {2, 33, 64, 130, 600}) {
    prompts.push_back(RandomPrompt(random, length));
    alone.push_back(Score(prompts.back())->prompt_logprobs);
  }
  std::vector<std::shared_ptr<Outcome>> together;
  for (size_t i = 0; i < prompts.size(); ++i)
    together.push_back(Submit(prompts[i], Greedy(6), std::make_shared<std::atomic<bool>>(false), SteadyTime::max(),
                              [](PrefillRequest& request) { request.prompt_logprobs = kNumTop; }));
  for (size_t i = 0; i < prompts.size(); ++i) {
    ASSERT_TRUE(together[i]->Wait() && together[i]->status.ok()) << together[i]->status;
    ExpectSame(together[i]->prompt_logprobs, alone[i]);
  }
}

TEST_F(PromptLogprobsTest, OneTokenHasNone) {
  Start();
  EXPECT_TRUE(Score({7})->prompt_logprobs.empty());
}

TEST_F(PromptLogprobsTest, WhatCannotBeServedIsRefused) {
  Start();
  const absl::Status approximate = Refused([](PrefillRequest& request) {
    request.reuse.policy = "sparsex";
    request.reuse_auto = true;
  });
  EXPECT_EQ(approximate.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(approximate.message()), ::testing::HasSubstr("'sparsex': choose 'exact'"));
  const absl::Status many = Refused([](PrefillRequest& request) { request.prompt_logprobs = 101; });
  EXPECT_THAT(std::string(many.message()), ::testing::HasSubstr("prompt_logprobs is 101"));
  const absl::Status large = Refused([](PrefillRequest& request) {
    request.tokens.assign(kMaxPromptLogprobs / 101 + 1, 5);
    request.prompt_logprobs = 100;
  });
  EXPECT_EQ(large.code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace spl::engine
