#include "services/engine/runtime/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "kernels/sampling/philox.h"
#include "tests/support/sample_on_host.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

constexpr int64_t kContext = 1000;

Sampler Make(const SamplingParams& params, std::vector<int32_t> eos = {}, int32_t fork = 0,
             std::vector<int32_t> prompt = {}) {
  return Sampler(params, std::move(eos), fork, prompt, {}, 10, kContext);
}

using test::SampleOnHost;

int32_t SampleOne(Sampler& sampler, std::vector<float> logits) { return SampleOnHost(sampler, logits).token; }

TEST(SamplerTest, GreedyTakesTheLargestAndBreaksTiesDownward) {
  SamplingParams params;
  params.temperature = 0;
  Sampler sampler = Make(params);
  EXPECT_EQ(SampleOne(sampler, {0, 3, 1, 3}), 1);
}

TEST(SamplerTest, FrequenciesFollowTheSoftmaxAtTheTemperature) {
  SamplingParams params;
  params.temperature = 2.0f;
  params.seed = 7;
  Sampler sampler = Make(params);
  const std::vector<float> logits = {2, 0, 1, -20};
  std::map<int32_t, int> counts;
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) ++counts[SampleOne(sampler, logits)];
  double total = 0;
  for (float x : logits) total += std::exp(x / 2.0);
  for (int32_t token = 0; token < 4; ++token) {
    const double p = std::exp(logits[token] / 2.0) / total;
    // Five standard deviations of a binomial count.
    EXPECT_NEAR(counts[token], kDraws * p, 5 * std::sqrt(kDraws * p * (1 - p)) + 1) << token;
  }
}

TEST(SamplerTest, TopKTopPMinPKeepExactlyTheSetTheyDefine) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
  const auto support = [&](const SamplingParams& params) {
    Sampler sampler = Make(params);
    std::vector<bool> seen(4, false);
    for (int i = 0; i < 4000; ++i) seen[SampleOne(sampler, logits)] = true;
    return seen;
  };
  SamplingParams top_k, top_p, min_p, both;
  top_k.top_k = 2;
  top_p.top_p = 0.79f;  // 0.5 + 0.3 crosses it
  min_p.min_p = 0.25f;  // of 0.5: keeps 0.15 (0.3), drops 0.05 (0.1)
  both.top_k = 3;
  both.top_p = 0.5f;
  EXPECT_THAT(support(top_k), testing::ElementsAre(true, true, false, false));
  EXPECT_THAT(support(top_p), testing::ElementsAre(true, true, false, false));
  EXPECT_THAT(support(min_p), testing::ElementsAre(true, true, true, false));
  EXPECT_THAT(support(both), testing::ElementsAre(true, false, false, false));
}

TEST(SamplerTest, SameSeedSameTokensOtherForkOthers) {
  SamplingParams params;
  params.seed = 42;
  const std::vector<float> flat(1000, 0.0f);
  const auto draw = [&](int32_t fork) {
    Sampler sampler = Make(params, {}, fork);
    std::vector<int32_t> tokens;
    for (int i = 0; i < 20; ++i) tokens.push_back(SampleOne(sampler, flat));
    return tokens;
  };
  EXPECT_EQ(draw(0), draw(0));
  EXPECT_NE(draw(0), draw(1));
}

TEST(SamplerTest, AResumedContinuationDrawsTheSameNumbers) {
  SamplingParams params;
  params.seed = 5;
  params.frequency_penalty = 0.5f;
  const std::vector<float> flat(300, 0.0f);
  Sampler whole = Make(params);
  std::vector<int32_t> tokens;
  for (int i = 0; i < 12; ++i) tokens.push_back(SampleOne(whole, flat));
  Sampler resumed(params, {}, 0, {}, std::span(tokens).first(5), 10, kContext);
  for (int i = 5; i < 12; ++i) EXPECT_EQ(SampleOne(resumed, flat), tokens[i]) << i;
}

TEST(SamplerTest, PenaltiesFollowTheirDefinitions) {
  SamplingParams params;
  params.temperature = 0;
  params.presence_penalty = 0.5f;
  params.frequency_penalty = 0.4f;
  Sampler sampler = Make(params);
  EXPECT_EQ(SampleOne(sampler, {1.0f, 0.5f, 0}), 0);
  EXPECT_EQ(SampleOne(sampler, {1.0f, 0.5f, 0}), 1);  // 1.0 - 0.9 < 0.5
  SamplingParams repetition;
  repetition.temperature = 0;
  repetition.repetition_penalty = 2.0f;
  Sampler by_prompt = Make(repetition, {}, 0, {0, 2});
  EXPECT_EQ(SampleOne(by_prompt, {1.0f, 0.6f, 0.9f}), 1);
  Sampler negative = Make(repetition, {}, 0, {0});
  EXPECT_EQ(SampleOne(negative, {-1.0f, -1.5f}), 1);  // a negative logit is multiplied
}

TEST(SamplerTest, LogitBiasForcesAndForbids) {
  SamplingParams params;
  params.temperature = 0;
  params.logit_bias = {{2, 100.0f}, {0, -100.0f}};
  Sampler sampler = Make(params);
  EXPECT_EQ(SampleOne(sampler, {5, 1, 1}), 2);
}

TEST(SamplerTest, EndTokensRespectMinTokensAndIgnoreEos) {
  SamplingParams params;
  params.temperature = 0;
  params.min_tokens = 2;
  Sampler sampler = Make(params, {0});
  std::vector<float> logits = {5, 1};
  EXPECT_EQ(SampleOnHost(sampler, logits).token, 1);
  logits = {5, 1};
  EXPECT_EQ(SampleOnHost(sampler, logits).token, 1);
  logits = {5, 1};
  const SampledToken end = SampleOnHost(sampler, logits);
  EXPECT_EQ(end.token, 0);
  EXPECT_EQ(end.finish, FinishReason::kStop);

  params.min_tokens = 0;
  params.ignore_eos = true;
  params.max_tokens = 1;
  Sampler ignoring = Make(params, {0});
  logits = {5, 1};
  const SampledToken last = SampleOnHost(ignoring, logits);
  EXPECT_EQ(last.token, 0);
  EXPECT_EQ(last.finish, FinishReason::kLength);

  params.stop_token_ids = {1};
  Sampler stopping = Make(params, {0});
  logits = {1, 5};
  EXPECT_EQ(SampleOnHost(stopping, logits).finish, FinishReason::kStop);
}

TEST(SamplerTest, ContextBoundsTheOutput) {
  SamplingParams params;
  params.temperature = 0;
  Sampler sampler(params, {}, 0, {}, {}, /*num_prompt_tokens=*/98, /*max_context=*/100);
  std::vector<float> logits = {1};
  EXPECT_EQ(SampleOnHost(sampler, logits).finish, FinishReason::kNone);
  EXPECT_EQ(SampleOnHost(sampler, logits).finish, FinishReason::kLength);
}

TEST(SamplerTest, LogprobsComeFromTheUnpenalisedDistribution) {
  SamplingParams params;
  params.temperature = 0;
  params.logit_bias = {{1, 100.0f}};
  params.num_logprobs = 2;
  Sampler sampler = Make(params);
  std::vector<float> logits = {std::log(0.7f), std::log(0.1f), std::log(0.2f)};
  const SampledToken token = SampleOnHost(sampler, logits);
  EXPECT_EQ(token.token, 1);
  ASSERT_TRUE(token.logprob.has_value());
  EXPECT_NEAR(token.logprob->logprob, std::log(0.1f), 1e-5);
  ASSERT_EQ(token.logprob->top.size(), 2u);
  EXPECT_EQ(token.logprob->top[0].first, 0);
  EXPECT_EQ(token.logprob->top[1].first, 2);
  EXPECT_NEAR(token.logprob->top[1].second, std::log(0.2f), 1e-5);
}

// What the kernels are given of a request, step by step.
TEST(SamplerTest, RowsSayWhatIsAskedAndKnown) {
  SamplingParams params;
  params.temperature = 0.5f;
  params.top_k = 3;
  params.top_p = 0.8f;
  params.min_p = 0.1f;
  params.repetition_penalty = 1.5f;
  params.presence_penalty = 0.25f;
  params.frequency_penalty = 0.5f;
  params.seed = 99;
  params.min_tokens = 2;
  params.logit_bias = {{7, 1.0f}, {7, 0.5f}};
  params.num_logprobs = 4;
  Sampler sampler(params, {1}, 2, std::vector<int32_t>{5, 5, 6}, {}, 3, kContext);
  const auto edit = [](const kernels::SampleRow& row, int32_t token) {
    const auto at =
        std::find_if(row.edits.begin(), row.edits.end(), [&](const auto& edit) { return edit.token == token; });
    return at == row.edits.end() ? kernels::TokenEdit{-1} : *at;
  };
  kernels::SampleRow row = sampler.Row(11);
  EXPECT_EQ(row.logits_row, 11);
  EXPECT_EQ(row.temperature, 0.5f);
  EXPECT_EQ(row.top_k, 3);
  EXPECT_EQ(row.top_p, 0.8f);
  EXPECT_EQ(row.min_p, 0.1f);
  EXPECT_EQ(row.num_top, 4);
  EXPECT_TRUE(row.bans_ends);
  EXPECT_EQ(row.random, kernels::SamplingRandom(99, 2, 0));
  EXPECT_EQ(row.edits.size(), 4u);  // 7, the end token, 5 and 6
  EXPECT_EQ(edit(row, 7).bias, 1.5f);
  EXPECT_EQ(edit(row, 1).flags, kernels::TokenEdit::kEnd);
  EXPECT_EQ(edit(row, 5).flags, kernels::TokenEdit::kInPrompt);
  // Each token changes one entry, and says which: a device is sent no more.
  for (const int32_t token : {5, 8, 8}) {
    const uint64_t version = row.edits_version;
    const int32_t count = std::max(edit(row, token).count, 0);
    sampler.Accept(token);
    row = sampler.Row(0);
    EXPECT_EQ(row.edits_version, version + 1);
    EXPECT_EQ(row.edits[static_cast<size_t>(row.last_edit)].token, token);
    EXPECT_EQ(row.edits[static_cast<size_t>(row.last_edit)].count, count + 1);
  }
  EXPECT_FALSE(row.bans_ends);
  EXPECT_EQ(row.random, kernels::SamplingRandom(99, 2, 3));
  EXPECT_NE(Sampler(params, {}, 0, {}, {}, 3, kContext).Row(0).edits_id, row.edits_id);
}

TEST(SamplerTest, PlainRowsHaveNoEdits) {
  SamplingParams params;
  params.temperature = 0;
  params.min_tokens = 1;
  Sampler sampler = Make(params, {3});
  EXPECT_FALSE(sampler.takes_argmax());
  EXPECT_EQ(sampler.Row(0).edits.size(), 1u);
  sampler.Accept(0);
  EXPECT_TRUE(sampler.takes_argmax());
  EXPECT_TRUE(sampler.Row(0).edits.empty());
  params.temperature = 1;
  EXPECT_FALSE(Make(params, {3}).takes_argmax());
}

// Tokens that have no logit, and rows without a number, are nobody's reason to write or read beside the row.
TEST(SamplerTest, NothingIsTouchedOutsideOfTheRow) {
  SamplingParams params;
  params.repetition_penalty = 2;
  params.frequency_penalty = 1;
  params.min_tokens = 100;
  params.logit_bias = {{-7, 5.0f}, {4, 5.0f}};
  constexpr int32_t kOutside[] = {-1, 4, 5, 0x7fffff00, std::numeric_limits<int32_t>::min()};
  for (const float temperature : {0.0f, 1.0f}) {
    params.temperature = temperature;
    Sampler sampler(params, {4, -2}, 0, kOutside, kOutside, 10, kContext);
    std::vector<float> guarded(12, 3.0f);  // the row is in the middle
    for (int i = 0; i < 20; ++i) {
      const int32_t token = SampleOnHost(sampler, std::span(guarded).subspan(4, 4)).token;
      EXPECT_TRUE(token >= 0 && token < 4) << token;
    }
    for (size_t i = 0; i < guarded.size(); ++i) {
      if (i < 4 || i >= 8) {
        EXPECT_EQ(guarded[i], 3.0f) << i;
      }
    }
  }
  SamplingParams plain;
  plain.top_p = 0.5f;
  Sampler sampler = Make(plain);
  for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()}) {
    const int32_t token = SampleOne(sampler, std::vector<float>(600, value));
    EXPECT_TRUE(token >= 0 && token < 600) << value << ": " << token;
  }
}

TEST(SamplerTest, EveryRangeIsCheckedAndNamed) {
  const auto error = [](auto&& change) {
    SamplingParams params;
    change(params);
    return ValidateSampling(params, 100).ToString();
  };
  using testing::HasSubstr;
  EXPECT_THAT(error([](auto&) {}), HasSubstr("OK"));
  EXPECT_THAT(error([](auto& p) { p.temperature = -1; }), HasSubstr("temperature"));
  EXPECT_THAT(error([](auto& p) { p.temperature = NAN; }), HasSubstr("temperature"));
  EXPECT_THAT(error([](auto& p) { p.top_k = -1; }), HasSubstr("top_k"));
  EXPECT_THAT(error([](auto& p) { p.top_p = 0; }), HasSubstr("top_p"));
  EXPECT_THAT(error([](auto& p) { p.top_p = 1.5; }), HasSubstr("top_p"));
  EXPECT_THAT(error([](auto& p) { p.min_p = 2; }), HasSubstr("min_p"));
  EXPECT_THAT(error([](auto& p) { p.repetition_penalty = 0; }), HasSubstr("repetition_penalty"));
  EXPECT_THAT(error([](auto& p) { p.presence_penalty = 3; }), HasSubstr("presence_penalty"));
  EXPECT_THAT(error([](auto& p) { p.frequency_penalty = -3; }), HasSubstr("frequency_penalty"));
  EXPECT_THAT(error([](auto& p) { p.num_forks = 0; }), HasSubstr("n is 0"));
  EXPECT_THAT(error([](auto& p) { p.num_logprobs = 101; }), HasSubstr("logprobs"));
  EXPECT_THAT(error([](auto& p) { p.logit_bias = {{100, 1.0f}}; }), HasSubstr("logit_bias"));
  EXPECT_THAT(error([](auto& p) { p.stop_token_ids = {-1}; }), HasSubstr("stop_token_ids"));
  EXPECT_THAT(error([](auto& p) { p.max_tokens = 2, p.min_tokens = 3; }), HasSubstr("min_tokens"));
}

// Token 1 so many times, then the end, out of 64 tokens. With so many left as `fails_at` no mask can be had.
class OnesGrammar final : public grammar::TokenGrammar {
 public:
  OnesGrammar(int num_ones, int32_t end, int fails_at = -1) : num_ones_(num_ones), end_(end), fails_at_(fails_at) {}
  std::unique_ptr<grammar::TokenMatcher> NewMatcher() const override { return std::make_unique<Matcher>(*this); }
  int32_t width() const override { return 64; }
  size_t num_bytes() const override { return 0; }

 private:
  class Matcher final : public grammar::TokenMatcher {
   public:
    explicit Matcher(const OnesGrammar& grammar) : grammar_(grammar), left_(grammar.num_ones_), end_(grammar.end_) {}
    absl::Status FillMask(std::span<uint32_t> mask) override {
      EXPECT_EQ(mask.size(), 2u);
      if (grammar_.fails_at_ == left_) return absl::ResourceExhaustedError("too slow");
      mask[0] = mask[1] = 0;
      const auto token = static_cast<uint32_t>(left_ > 0 ? 1 : end_);
      mask[token / 32] = 1u << (token % 32);
      return absl::OkStatus();
    }
    absl::Status Accept(int32_t token) override {
      if (ended_ || token != (left_ > 0 ? 1 : end_)) return absl::InvalidArgumentError("does not fit");
      ended_ = left_-- == 0;
      return absl::OkStatus();
    }
    bool ended() const override { return ended_; }
    bool complete() const override { return left_ == 0; }

   private:
    const OnesGrammar& grammar_;
    int left_;
    const int32_t end_;
    bool ended_ = false;
  };
  const int num_ones_;
  const int32_t end_;
  const int fails_at_;
};

TEST(SamplerGrammarTest, TakesWhatFitsAndEndsThere) {
  const std::vector<float> logits = [] {
    std::vector<float> made(64, 1.0f);
    made[7] = 50;  // what the model would say
    return made;
  }();
  SamplingParams params;
  params.temperature = 0;
  params.min_tokens = 10;  // nothing but the end fits before
  params.grammar = std::make_shared<OnesGrammar>(3, 40);
  Sampler sampler(params, {40}, 0, {}, {}, 5, 1000);
  EXPECT_FALSE(sampler.takes_argmax());
  for (int i = 0; i < 3; ++i) {
    const SampledToken token = test::SampleOnHost(sampler, logits);
    EXPECT_EQ(token.token, 1);
    EXPECT_EQ(token.finish, FinishReason::kNone);
  }
  const SampledToken last = test::SampleOnHost(sampler, logits);
  EXPECT_EQ(last.token, 40);
  EXPECT_EQ(last.finish, FinishReason::kStop);
}

TEST(SamplerGrammarTest, GoesOnFromPriorOutputAndFromTokensSampledElsewhere) {
  SamplingParams params;
  params.temperature = 0;
  params.grammar = std::make_shared<OnesGrammar>(3, 40);
  const std::vector<int32_t> prior = {1, 1};
  Sampler sampler(params, {40}, 0, {}, prior, 5, 1000);
  sampler.Accept(1);
  EXPECT_EQ(sampler.Row(0).mask[1], 1u << 8) << "only the end fits";
  EXPECT_EQ(test::SampleOnHost(sampler, std::vector<float>(64, 0.0f)).finish, FinishReason::kStop);
}

// Logits that are no numbers give token 0, whatever the mask says.
TEST(SamplerGrammarTest, AnAnswerThatCannotFitBreaksOff) {
  SamplingParams params;
  params.grammar = std::make_shared<OnesGrammar>(3, 40);
  Sampler sampler(params, {40}, 0, {}, {}, 5, 1000);
  const std::vector<float> none(64, std::numeric_limits<float>::quiet_NaN());
  const SampledToken token = test::SampleOnHost(sampler, none);
  EXPECT_EQ(token.token, 0);
  EXPECT_EQ(token.finish, FinishReason::kError);
}

TEST(SamplerGrammarTest, AMaskThatCannotBeHadEndsItsContinuationWithAnError) {
  SamplingParams params;
  params.temperature = 0;
  params.grammar = std::make_shared<OnesGrammar>(3, 40, 1);
  Sampler sampler(params, {40}, 0, {}, {}, 5, 1000);
  const std::vector<float> logits(64, 0.0f);
  EXPECT_EQ(test::SampleOnHost(sampler, logits).finish, FinishReason::kNone);
  EXPECT_EQ(test::SampleOnHost(sampler, logits).finish, FinishReason::kNone);
  EXPECT_EQ(test::SampleOnHost(sampler, logits).finish, FinishReason::kError);
}

}  // namespace
}  // namespace spl::engine
