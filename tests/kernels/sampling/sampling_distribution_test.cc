// Frequencies of sampled tokens against a definition in double precision that shares nothing with the kernels:
// Pearson's chi-square for every parameter and for 200 combinations of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "tests/kernels/sampling/sampling_batch.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr double kLeastP = 1e-4;
constexpr int kDraws = 4000;

// The distribution that a request asks for.
std::vector<double> Probabilities(const std::vector<float>& logits, const SampleRow& row) {
  std::vector<double> y(logits.begin(), logits.end());
  for (const TokenEdit& edit : row.edits) {
    double& of_token = y[static_cast<size_t>(edit.token)];
    of_token += edit.bias;
    if (row.bans_ends && (edit.flags & TokenEdit::kEnd) != 0) of_token = -INFINITY;
    if (edit.count > 0 || (edit.flags & TokenEdit::kInPrompt) != 0)
      of_token = of_token > 0 ? of_token / row.repetition_penalty : of_token * row.repetition_penalty;
    if (edit.count > 0) of_token -= row.presence_penalty + double{row.frequency_penalty} * edit.count;
  }
  for (size_t i = 0; i < y.size() && !row.mask.empty(); ++i) {
    if ((row.mask[i / 32] >> (i % 32) & 1) == 0) y[i] = -INFINITY;
  }
  const double max = *std::max_element(y.begin(), y.end());
  std::vector<double> p(y.size());
  for (size_t i = 0; i < y.size(); ++i) {
    p[i] = std::exp((y[i] - max) / row.temperature);
    if (p[i] < row.min_p) p[i] = 0;
  }
  std::vector<size_t> falling(y.size());
  std::iota(falling.begin(), falling.end(), 0);
  std::sort(falling.begin(), falling.end(), [&](size_t a, size_t b) { return y[a] > y[b]; });
  const auto cut_below = [&](double least) {
    for (size_t i = 0; i < y.size(); ++i) {
      if (y[i] < least) p[i] = 0;
    }
  };
  if (row.top_k > 0 && static_cast<size_t>(row.top_k) < y.size())
    cut_below(y[falling[static_cast<size_t>(row.top_k) - 1]]);
  if (row.top_p < 1) {
    const double total = std::accumulate(p.begin(), p.end(), 0.0);
    double reached = 0;
    for (const size_t i : falling) {
      reached += p[i];
      if (reached < row.top_p * total) continue;
      cut_below(y[i]);
      break;
    }
  }
  const double total = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= total;
  return p;
}

// The probability that a chi-square variable of so many degrees of freedom is at least x: the regularised incomplete
// gamma function Q(degrees / 2, x / 2), by its series or its continued fraction (Numerical Recipes 6.2).
double UpperTail(double degrees, double x) {
  const double a = degrees / 2, z = x / 2;
  if (z <= 0) return 1;
  const double front = std::exp(-z + a * std::log(z) - std::lgamma(a));
  if (z < a + 1) {
    double term = 1 / a, sum = term;
    for (double n = a + 1; term > sum * 1e-15; ++n) sum += term *= z / n;
    return 1 - sum * front;
  }
  double b = z + 1 - a, c = 1e300, d = 1 / b, h = d;
  for (int i = 1; i < 10'000; ++i) {
    const double an = -i * (i - a);
    b += 2;
    d = 1 / (an * d + b);
    c = b + an / c;
    h *= d * c;
    if (std::abs(d * c - 1) < 1e-15) break;
  }
  return front * h;
}

// The probability of counts at least as far from `p`; tokens of few expected draws are put together.
double PValue(const std::vector<double>& p, const std::vector<int32_t>& tokens) {
  std::vector<double> counts(p.size(), 0);
  for (const int32_t token : tokens) ++counts[static_cast<size_t>(token)];
  double statistic = 0, rest_expected = 0, rest_count = 0;
  int cells = 0;
  const auto add = [&](double expected, double count) {
    statistic += (count - expected) * (count - expected) / expected;
    ++cells;
  };
  for (size_t i = 0; i < p.size(); ++i) {
    const double expected = p[i] * static_cast<double>(tokens.size());
    if (expected == 0 && counts[i] > 0) return 0;
    if (expected >= 5) {
      add(expected, counts[i]);
    } else {
      rest_expected += expected;
      rest_count += counts[i];
    }
  }
  if (rest_expected >= 1) add(rest_expected, rest_count);
  return cells < 2 ? 1 : UpperTail(cells - 1, statistic);
}

// Of `draws` tokens by numbers from `seed`.
double PValueOf(const std::vector<float>& logits, const SampleRow& row, uint64_t seed, int draws) {
  SamplingBatch batch{.width = static_cast<int64_t>(logits.size()), .logits = logits};
  batch.rows.assign(static_cast<size_t>(draws), row);
  for (size_t i = 0; i < batch.rows.size(); ++i) batch.rows[i].random = SamplingRandom(seed, 2, i);
  return PValue(Probabilities(logits, row), RunSampling(batch, &cpu::SampleTokens, {.isa = DetectCpuIsa()}).tokens);
}

// Of hundreds of right samplers one is below the bound once in fifty runs: it is asked again, more and other numbers.
void ExpectDistribution(Random& random, const std::vector<float>& logits, const SampleRow& row,
                        const std::string& what) {
  const uint64_t seed = random.engine()();
  double p = PValueOf(logits, row, seed, kDraws);
  if (p <= kLeastP) {
    std::cout << what << ": p " << p << " with seed " << seed << "; again\n";
    p = PValueOf(logits, row, seed + 1, 8 * kDraws);
  }
  EXPECT_GT(p, kLeastP) << what << ", seed " << seed + 1;
}

std::vector<float> Normals(Random& random, size_t n, float spread) {
  std::vector<float> logits = random.Normals(n);
  for (float& x : logits) x *= spread;
  return logits;
}

TEST(SamplingDistributionTest, TheTestFindsAWrongDistribution) {
  Random random(1);
  const std::vector<float> logits = Normals(random, 100, 1);
  SamplingBatch batch{.width = 100, .logits = logits, .rows = std::vector<SampleRow>(kDraws, {.temperature = 1.4f})};
  for (size_t i = 0; i < batch.rows.size(); ++i) batch.rows[i].random = SamplingRandom(9, 0, i);
  const std::vector<int32_t> tokens = RunSampling(batch, &cpu::SampleTokens).tokens;
  EXPECT_GT(PValue(Probabilities(logits, {.temperature = 1.4f}), tokens), kLeastP);
  EXPECT_LT(PValue(Probabilities(logits, {.temperature = 1}), tokens), kLeastP);
  EXPECT_NEAR(UpperTail(1, 3.841459), 0.05, 1e-6);
  EXPECT_NEAR(UpperTail(10, 18.307038), 0.05, 1e-6);
  EXPECT_NEAR(UpperTail(10, 2), 0.996340, 1e-6);
}

TEST(SamplingDistributionTest, EveryParameterAlone) {
  Random random(2);
  const std::vector<float> logits = Normals(random, 200, 2);
  std::vector<TokenEdit> edits;
  for (int32_t token = 0; token < 200; token += 3)
    edits.push_back({.token = token,
                     .bias = token % 2 == 0 ? 0.75f : 0.0f,
                     .count = token % 5,
                     .flags = token % 4 == 0 ? TokenEdit::kEnd : TokenEdit::kInPrompt});
  const std::vector<TokenEdit> counts = [&] {
    std::vector<TokenEdit> list = edits;
    for (TokenEdit& edit : list) edit.bias = 0;
    return list;
  }();
  std::vector<uint32_t> mask(7);
  for (uint32_t& word : mask) word = static_cast<uint32_t>(random.engine()());
  const std::pair<const char*, SampleRow> rows[] = {
      {"temperature 1", {.temperature = 1}},
      {"temperature 0.3", {.temperature = 0.3f}},
      {"temperature 2", {.temperature = 2}},
      {"top_k", {.temperature = 1, .top_k = 17}},
      {"top_p", {.temperature = 1, .top_p = 0.8f}},
      {"min_p", {.temperature = 1, .min_p = 0.07f}},
      {"repetition_penalty", {.temperature = 1, .repetition_penalty = 1.4f, .edits = counts}},
      {"presence_penalty", {.temperature = 1, .presence_penalty = 0.8f, .edits = counts}},
      {"frequency_penalty", {.temperature = 1, .frequency_penalty = 0.4f, .edits = counts}},
      {"logit_bias", {.temperature = 1, .edits = edits}},
      {"min_tokens", {.temperature = 1, .bans_ends = true, .edits = counts}},
      {"mask", {.temperature = 1, .mask = mask}}};
  for (const auto& [what, row] : rows) ExpectDistribution(random, logits, row, what);
}

TEST(SamplingDistributionTest, TwoHundredCombinations) {
  Random random(3);
  for (int round = 0; round < 200; ++round) {
    const auto width = static_cast<size_t>(random.Int(2, 400));
    const std::vector<float> logits = Normals(random, width, OneOf(random, 0.3, 1, 2, 4));
    SampleRow row{.temperature = OneOf(random, 0.2, 0.7, 1, 1.5),
                  .top_k = static_cast<int32_t>(OneOf(random, 0, 1, 7, 50)),
                  .top_p = OneOf(random, 1, 0.95, 0.6),
                  .min_p = OneOf(random, 0, 0, 0.02)};
    std::vector<TokenEdit> edits;
    if (random.Int(0, 1) == 0) {
      for (int32_t token = 0; token < static_cast<int32_t>(width); token += random.Int(1, 6))
        edits.push_back({.token = token,
                         .bias = OneOf(random, 0, 0.5, -1),
                         .count = random.Int(0, 3),
                         .flags = static_cast<uint32_t>(random.Int(0, 3))});
      row.edits = edits;
      row.repetition_penalty = OneOf(random, 1, 1.2, 0.9);
      row.presence_penalty = OneOf(random, 0, 0.4);
      row.frequency_penalty = OneOf(random, 0, -0.3);
      row.bans_ends = random.Int(0, 1) == 0;
    }
    std::vector<uint32_t> mask;
    if (random.Int(0, 2) == 0) {
      mask.resize((width + 31) / 32);
      for (uint32_t& word : mask) word = static_cast<uint32_t>(random.engine()());
      mask[0] |= 1;
      if (!edits.empty()) row.bans_ends = false;  // something is left
      row.mask = mask;
    }
    if (row.bans_ends &&
        std::all_of(edits.begin(), edits.end(),
                    [](const TokenEdit& edit) { return (edit.flags & TokenEdit::kEnd) != 0; }) &&
        edits.size() == width)
      row.bans_ends = false;
    SamplingBatch described{.width = static_cast<int64_t>(width), .rows = {row}};
    ExpectDistribution(random, logits, row, "round " + std::to_string(round) + ", " + Describe(described, 0));
  }
}

}  // namespace
}  // namespace spl::kernels
