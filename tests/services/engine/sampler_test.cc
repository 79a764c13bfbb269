#include "services/engine/runtime/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

constexpr int64_t kContext = 1000;

Sampler Make(const SamplingParams& params, std::vector<int32_t> eos = {}, int32_t fork = 0,
             std::vector<int32_t> prompt = {}) {
  return Sampler(params, std::move(eos), fork, prompt, {}, 10, kContext);
}

int32_t SampleOne(Sampler& sampler, std::vector<float> logits) { return sampler.Sample(logits).token; }

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
  EXPECT_EQ(sampler.Sample(logits).token, 1);
  logits = {5, 1};
  EXPECT_EQ(sampler.Sample(logits).token, 1);
  logits = {5, 1};
  const SampledToken end = sampler.Sample(logits);
  EXPECT_EQ(end.token, 0);
  EXPECT_EQ(end.finish, FinishReason::kStop);

  params.min_tokens = 0;
  params.ignore_eos = true;
  params.max_tokens = 1;
  Sampler ignoring = Make(params, {0});
  logits = {5, 1};
  const SampledToken last = ignoring.Sample(logits);
  EXPECT_EQ(last.token, 0);
  EXPECT_EQ(last.finish, FinishReason::kLength);

  params.stop_token_ids = {1};
  Sampler stopping = Make(params, {0});
  logits = {1, 5};
  EXPECT_EQ(stopping.Sample(logits).finish, FinishReason::kStop);
}

TEST(SamplerTest, ContextBoundsTheOutput) {
  SamplingParams params;
  params.temperature = 0;
  Sampler sampler(params, {}, 0, {}, {}, /*num_prompt_tokens=*/98, /*max_context=*/100);
  std::vector<float> logits = {1};
  EXPECT_EQ(sampler.Sample(logits).finish, FinishReason::kNone);
  EXPECT_EQ(sampler.Sample(logits).finish, FinishReason::kLength);
}

TEST(SamplerTest, LogprobsComeFromTheUnpenalisedDistribution) {
  SamplingParams params;
  params.temperature = 0;
  params.logit_bias = {{1, 100.0f}};
  params.num_logprobs = 2;
  Sampler sampler = Make(params);
  std::vector<float> logits = {std::log(0.7f), std::log(0.1f), std::log(0.2f)};
  const SampledToken token = sampler.Sample(logits);
  EXPECT_EQ(token.token, 1);
  ASSERT_TRUE(token.logprob.has_value());
  EXPECT_NEAR(token.logprob->logprob, std::log(0.1f), 1e-5);
  ASSERT_EQ(token.logprob->top.size(), 2u);
  EXPECT_EQ(token.logprob->top[0].first, 0);
  EXPECT_EQ(token.logprob->top[1].first, 2);
  EXPECT_NEAR(token.logprob->top[1].second, std::log(0.2f), 1e-5);
}

// A token by its definition: all candidates in falling order, and sums in that order.
int32_t DrawBySorting(const SamplingParams& params, std::span<const float> logits, double uniform) {
  const double max = *std::max_element(logits.begin(), logits.end());
  const double keep_above = params.min_p > 0 ? std::log(params.min_p) : -1e30, inverse_t = 1.0 / params.temperature;
  std::vector<std::pair<float, int32_t>> candidates;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double x = (logits[i] - max) * inverse_t;
    if (x >= keep_above && x > -80) candidates.emplace_back(static_cast<float>(std::exp(x)), static_cast<int32_t>(i));
  }
  size_t kept = candidates.size();
  if (params.top_k > 0) kept = std::min<size_t>(kept, params.top_k);
  if (params.top_p < 1.0f || kept < candidates.size())
    std::sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first > b.first : a.second < b.second;
    });
  candidates.resize(kept);
  double total = 0;
  for (const auto& [weight, token] : candidates) total += weight;
  if (params.top_p < 1.0f) {
    double share = 0;
    size_t n = 0;
    while (n < candidates.size() && share < params.top_p * total) share += candidates[n++].first;
    candidates.resize(std::max<size_t>(n, 1));
    total = share;
  }
  double target = uniform * total;
  for (const auto& [weight, token] : candidates) {
    target -= weight;
    if (target < 0) return token;
  }
  return candidates.back().second;
}

// The numbers that a sampler draws, as sampler.h defines them.
double UniformOf(uint64_t seed, uint64_t fork, uint64_t output) {
  const auto mix = [](uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
  };
  return static_cast<double>(mix(mix(mix(seed) ^ fork) + output) >> 11) * 0x1.0p-53;
}

// Whatever is kept and however the logits lie, the token is the one that sorting everything gives.
TEST(SamplerTest, TokensAreThoseOfSortingEverything) {
  std::mt19937 random = test::SeededRandom("sorting everything");
  const auto one_of = [&](auto... values) {
    const float all[] = {static_cast<float>(values)...};
    return all[random() % std::size(all)];
  };
  for (int round = 0; round < 1500; ++round) {
    std::vector<float> logits(round % 100 == 0 ? 131'072 : 1 + random() % 6'000);
    const float spread = one_of(0, 0.01, 1, 4, 30), step = one_of(0, 0.5);
    std::normal_distribution<float> normal(0, 1);
    for (float& x : logits) {
      x = spread * normal(random);
      if (step > 0) x = std::round(x / step) * step;  // many equal ones
      if (random() % 50 == 0) x = -std::numeric_limits<float>::infinity();
    }
    logits[random() % logits.size()] = 1;
    SamplingParams params;
    params.temperature = one_of(0.01, 0.7, 1, 2, 50);
    params.top_p = one_of(1, 1, 0.999999, 0.99, 0.9, 0.5, 0.01);
    params.top_k = static_cast<int32_t>(one_of(0, 0, 1, 5, 600, 3000, 200'000));
    params.min_p = one_of(0, 0, 0, 0.05, 1);
    params.seed = random();
    Sampler sampler = Make(params, {}, 3);
    for (uint64_t output = 0; output < 3; ++output)
      ASSERT_EQ(SampleOne(sampler, logits), DrawBySorting(params, logits, UniformOf(params.seed, 3, output)))
          << "round " << round << ", " << logits.size() << " logits, temperature " << params.temperature << ", top_p "
          << params.top_p << ", top_k " << params.top_k << ", min_p " << params.min_p;
  }
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
      const int32_t token = sampler.Sample(std::span(guarded).subspan(4, 4)).token;
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

}  // namespace
}  // namespace spl::engine
