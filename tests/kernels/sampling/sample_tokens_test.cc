#include "kernels/sampling/sample_tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/common/thread_pool.h"
#include "kernels/sampling/sampling_math.h"
#include "tests/kernels/sampling/sampling_batch.h"

namespace spl::kernels {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

// The known answers of Random123's kat_vectors.
TEST(PhiloxTest, GivesTheKnownAnswers) {
  EXPECT_THAT(Philox4x32({0, 0, 0, 0}, {0, 0}), ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  EXPECT_THAT(Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
              ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_THAT(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
              ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

TEST(SamplingMathTest, WeightsArePowersOfTwoWithinTwoUlp) {
  Random random(1);
  EXPECT_EQ(sampling::WeightOfExponent(0), uint64_t{1} << kWeightBits);
  EXPECT_EQ(sampling::WeightOfExponent(-1), uint64_t{1} << (kWeightBits - 1));
  EXPECT_EQ(sampling::WeightOfExponent(-40), 1u);
  EXPECT_EQ(sampling::WeightOfExponent(-41), 0u);
  EXPECT_EQ(sampling::WeightOfExponent(sampling::kMinExponent), 0u);
  double worst = 0;
  for (int i = 0; i < 2'000'000; ++i) {
    const float t = -static_cast<float>(random.Int(0, 1 << 24)) * std::ldexp(16.0f, -24);  // nothing is cut off
    const double exact = std::exp2(static_cast<double>(t));
    const double got = std::ldexp(static_cast<double>(sampling::WeightOfExponent(t)), -kWeightBits);
    worst = std::max(worst, std::abs(got - exact) / std::ldexp(1.0, std::ilogb(exact) - 23));
  }
  std::cout << "worst error " << worst << " ulp\n";
  EXPECT_LE(worst, 2);
  EXPECT_EQ(sampling::WeightOf(kNan, 3, 1), 0u);
  EXPECT_EQ(sampling::WeightOf(-kInf, 3, 1), 0u);
}

TEST(SamplingMathTest, KeysAreInTheOrderOfTheNumbers) {
  const float rising[] = {-kInf, -3e38f, -1, -1e-40f, 0, 1e-40f, 1, 3e38f, kInf};
  for (size_t i = 1; i < std::size(rising); ++i) {
    EXPECT_LT(sampling::OrderedKey(rising[i - 1]), sampling::OrderedKey(rising[i])) << rising[i];
    EXPECT_EQ(sampling::OfKey(sampling::OrderedKey(rising[i])), rising[i]);
  }
  EXPECT_EQ(sampling::OrderedKey(-0.0f), sampling::OrderedKey(0.0f));
  EXPECT_LT(sampling::OrderedKey(kNan), sampling::OrderedKey(-kInf));
}

using Op = absl::Status (*)(const KernelContext&, const SampleTokensArgs&);

class SampleTokensTest : public ::testing::TestWithParam<Op> {
 protected:
  SamplingOutput Run(const SamplingBatch& batch) const { return RunSampling(batch, GetParam()); }
  // The token of each row of these logits.
  std::vector<int32_t> Tokens(std::vector<float> logits, std::vector<SampleRow> rows) const {
    SamplingBatch batch{.width = static_cast<int64_t>(logits.size()), .logits = std::move(logits), .rows = rows};
    return Run(batch).tokens;
  }
  int32_t Token(std::vector<float> logits, const SampleRow& row) const { return Tokens(std::move(logits), {row})[0]; }
  // Which tokens are drawn at all.
  std::vector<bool> Drawn(const std::vector<float>& logits, SampleRow row) const {
    std::vector<SampleRow> rows(4000, row);
    for (size_t i = 0; i < rows.size(); ++i) rows[i].random = SamplingRandom(3, 0, i);
    std::vector<bool> drawn(logits.size(), false);
    for (const int32_t token : Tokens(logits, rows)) drawn[static_cast<size_t>(token)] = true;
    return drawn;
  }
};

TEST_P(SampleTokensTest, GreedyIsArgmax) {
  EXPECT_EQ(Token({0, 3, 1, 3}, {}), 1);
  EXPECT_EQ(Token({kNan, -5, kNan}, {}), 1);
  EXPECT_EQ(Token({kNan, kNan}, {}), 0);
  EXPECT_EQ(Token({kNan, -kInf, -kInf}, {}), 1);
  EXPECT_EQ(Token({0, kInf, kNan}, {}), 1);
}

TEST_P(SampleTokensTest, WithoutAFiniteCandidateItIsArgmaxToo) {
  for (const uint64_t random : {uint64_t{0}, ~uint64_t{0}}) {
    EXPECT_EQ(Token({kNan, -kInf, -kInf}, {.temperature = 1, .random = random}), 1);
    EXPECT_EQ(Token({kNan, kNan, kNan}, {.temperature = 1, .top_k = 1, .random = random}), 0);
    EXPECT_EQ(Token({0, kInf, kInf}, {.temperature = 1, .top_p = 0.5, .random = random}), 1);
  }
}

TEST_P(SampleTokensTest, NeitherNanNorMinusInfinityIsDrawn) {
  EXPECT_THAT(Drawn({kNan, 0, -kInf, 0, kNan}, {.temperature = 100}), ElementsAre(false, true, false, true, false));
}

TEST_P(SampleTokensTest, TheSmallestAndTheLargestNumberTakeTheFirstAndTheLastToken) {
  EXPECT_EQ(Token({kNan, 0, 1, 0, kNan}, {.temperature = 1, .random = 0}), 1);
  EXPECT_EQ(Token({kNan, 0, 1, 0, kNan}, {.temperature = 1, .random = ~uint64_t{0}}), 3);
}

TEST_P(SampleTokensTest, KeepsExactlyTheSetThatIsDefined) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
  EXPECT_THAT(Drawn(logits, {.temperature = 1}), ElementsAre(true, true, true, true));
  EXPECT_THAT(Drawn(logits, {.temperature = 1, .top_k = 2}), ElementsAre(true, true, false, false));
  EXPECT_THAT(Drawn(logits, {.temperature = 1, .top_k = 4}), ElementsAre(true, true, true, true));
  EXPECT_THAT(Drawn(logits, {.temperature = 1, .top_p = 0.79f}), ElementsAre(true, true, false, false));
  EXPECT_THAT(Drawn(logits, {.temperature = 1, .top_p = 0.81f}), ElementsAre(true, true, true, false));
  EXPECT_THAT(Drawn(logits, {.temperature = 1, .top_p = 1e-30f}), ElementsAre(true, false, false, false));
  // 0.25 of 0.5 keeps 0.15, which is 0.3 of it, and drops 0.05.
  EXPECT_THAT(Drawn(logits, {.temperature = 1, .min_p = 0.25f}), ElementsAre(true, true, true, false));
  EXPECT_THAT(Drawn(logits, {.temperature = 1, .min_p = 1}), ElementsAre(true, false, false, false));
  // top_p of what top_k keeps: 0.5 of 0.8.
  EXPECT_THAT(Drawn(logits, {.temperature = 1, .top_k = 2, .top_p = 0.6f}), ElementsAre(true, false, false, false));
  EXPECT_THAT(Drawn(logits, {.temperature = 1, .top_k = 2, .top_p = 0.63f}), ElementsAre(true, true, false, false));
}

TEST_P(SampleTokensTest, TiesAtAThresholdAreAllKept) {
  EXPECT_THAT(Drawn({1, 2, 1, 0, 1}, {.temperature = 1, .top_k = 2}), ElementsAre(true, true, true, false, true));
  EXPECT_THAT(Drawn({1, 1, 0.9f}, {.temperature = 1, .top_p = 0.1f}), ElementsAre(true, true, false));
  EXPECT_THAT(Drawn({0, -0.0f, -1}, {.temperature = 1, .top_k = 1}), ElementsAre(true, true, false));
}

TEST_P(SampleTokensTest, EditsComeInTheirOrder) {
  const auto token = [&](std::vector<float> logits, SampleRow row, std::vector<TokenEdit> edits) {
    row.edits = edits;
    return Token(std::move(logits), row);
  };
  EXPECT_EQ(token({5, 1, 1}, {}, {{.token = 2, .bias = 100}, {.token = 0, .bias = -100}}), 2);
  EXPECT_EQ(token({5, 1}, {.bans_ends = true}, {{.token = 0, .flags = TokenEdit::kEnd}}), 1);
  EXPECT_EQ(token({5, 1}, {.bans_ends = false}, {{.token = 0, .flags = TokenEdit::kEnd}}), 0);
  // A bias does not lift a ban.
  EXPECT_EQ(token({5, 1}, {.bans_ends = true}, {{.token = 0, .bias = 100, .flags = TokenEdit::kEnd}}), 1);
  const SampleRow repetition{.repetition_penalty = 2};
  EXPECT_EQ(token({1, 0.6f}, repetition, {{.token = 0, .flags = TokenEdit::kInPrompt}}), 1);
  EXPECT_EQ(token({1, 0.6f}, repetition, {{.token = 0, .count = 1}}), 1);
  EXPECT_EQ(token({-1, -1.5f}, repetition, {{.token = 0, .count = 3, .flags = TokenEdit::kInPrompt}}), 1);
  const SampleRow counted{.presence_penalty = 0.5f, .frequency_penalty = 0.2f};
  EXPECT_EQ(token({1, 0.35f}, counted, {{.token = 0, .flags = TokenEdit::kInPrompt}}), 0);  // not generated
  EXPECT_EQ(token({1, 0.35f}, counted, {{.token = 0, .count = 1}}), 1);                     // 0.3
  EXPECT_EQ(token({1, 0.25f}, counted, {{.token = 0, .count = 1}}), 0);
  EXPECT_EQ(token({1, 0.25f}, counted, {{.token = 0, .count = 2}}), 1);  // 0.1
  // (1 + 3) / 2 - 0.5 - 0.2 = 1.3
  const SampleRow all{.repetition_penalty = 2, .presence_penalty = 0.5f, .frequency_penalty = 0.2f};
  EXPECT_EQ(token({1, 1.29f}, all, {{.token = 0, .bias = 3, .count = 1}}), 0);
  EXPECT_EQ(token({1, 1.31f}, all, {{.token = 0, .bias = 3, .count = 1}}), 1);
}

TEST_P(SampleTokensTest, EditsOutsideOfTheRowDoNothing) {
  std::vector<float> guarded(12, 3.0f);
  const std::vector<TokenEdit> edits = {{.token = -1, .bias = 9},
                                        {.token = 4, .bias = 9},
                                        {.token = -4, .bias = 9},
                                        {.token = std::numeric_limits<int32_t>::min(), .bias = 9},
                                        {.token = std::numeric_limits<int32_t>::max(), .bias = 9}};
  SamplingBatch batch{.width = 4, .logits = guarded};
  for (const float temperature : {0.0f, 1.0f})
    batch.rows.push_back({.logits_row = 1, .temperature = temperature, .edits = edits});
  for (const int32_t token : Run(batch).tokens) EXPECT_TRUE(token >= 0 && token < 4) << token;
  EXPECT_EQ(batch.logits, guarded);
}

TEST_P(SampleTokensTest, TheMaskForbids) {
  std::vector<float> logits(70, 1.0f);
  logits[3] = 9;
  const std::vector<uint32_t> mask = {0, 0, 1u << 2 | 1u << 5};
  EXPECT_EQ(Token(logits, {.mask = mask}), 66);
  std::vector<bool> expected(70, false);
  expected[66] = expected[69] = true;
  EXPECT_EQ(Drawn(logits, {.temperature = 1, .mask = mask}), expected);
}

TEST_P(SampleTokensTest, LogProbabilitiesAreOfTheRowItself) {
  const std::vector<TokenEdit> edits = {{.token = 1, .bias = 100}};
  SamplingBatch batch{.width = 4, .logits = {std::log(0.6f), std::log(0.1f), kNan, std::log(0.3f)}};
  batch.rows = {{.num_top = 4, .edits = edits}, {.temperature = 3, .num_top = 0}, {}};
  const SamplingOutput out = Run(batch);
  EXPECT_EQ(out.rows[0].token, 1);
  EXPECT_NEAR(LogprobOf(out.rows[0].logit, out.rows[0]), std::log(0.1), 1e-6);
  const int32_t tokens[] = {0, 3, 1, -1};
  const double probabilities[] = {0.6, 0.3, 0.1};
  for (int n = 0; n < 4; ++n) EXPECT_EQ(out.top[static_cast<size_t>(n)].token, tokens[n]);
  for (int n = 0; n < 3; ++n)
    EXPECT_NEAR(LogprobOf(out.top[static_cast<size_t>(n)].logit, out.rows[0]), std::log(probabilities[n]), 1e-6);
  EXPECT_NEAR(LogprobOf(batch.logits[static_cast<size_t>(out.rows[1].token)], out.rows[1]),
              batch.logits[static_cast<size_t>(out.rows[1].token)], 1e-6);
  EXPECT_EQ(out.rows[2].total, 0u);
}

// The tokens of a row do not depend on what else is in the batch, nor on where it is.
TEST_P(SampleTokensTest, RowsAreIndependent) {
  Random random(7);
  const SamplingBatch batch = RandomSampling(random, 1234, 5, 8);
  const SamplingOutput together = Run(batch);
  for (size_t i = 0; i < batch.rows.size(); ++i) {
    SamplingBatch alone = batch;
    alone.rows = {batch.rows[i]};
    EXPECT_EQ(Run(alone).rows[0].token, together.rows[i].token) << Describe(batch, i);
  }
}

TEST_P(SampleTokensTest, RefusesWhatItsContractForbids) {
  const auto error = [&](const std::function<void(SampleTokensArgs&, SampleRow&)>& change) {
    SamplingOutput out;
    SamplingBatch batch{.width = 4, .logits = {1, 2, 3, 4}, .rows = {{.temperature = 1, .num_top = 2}}};
    SampleTokensArgs args = batch.Args(out);
    change(args, batch.rows[0]);
    const absl::Status status = GetParam()({}, args);
    EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kInvalidArgument);
    return status.ToString();
  };
  EXPECT_THAT(error([](auto&, auto&) {}), HasSubstr("OK"));
  EXPECT_THAT(error([](auto& a, auto&) { a.width = 0; }), HasSubstr("shape"));
  EXPECT_THAT(error([](auto& a, auto&) { a.width = kMaxSampledWidth + 1; }), HasSubstr("shape"));
  EXPECT_THAT(error([](auto& a, auto&) { a.logits = nullptr; }), HasSubstr("null"));
  EXPECT_THAT(error([](auto& a, auto&) { a.top = nullptr; }), HasSubstr("null top"));
  EXPECT_THAT(error([](auto& a, auto&) { a.top_stride = 1; }), HasSubstr("num_top"));
  EXPECT_THAT(error([](auto&, auto& r) { r.logits_row = 1; }), HasSubstr("logits_row"));
  EXPECT_THAT(error([](auto&, auto& r) { r.temperature = kNan; }), HasSubstr("temperature"));
  EXPECT_THAT(error([](auto&, auto& r) { r.temperature = -1; }), HasSubstr("temperature"));
  EXPECT_THAT(error([](auto&, auto& r) { r.top_k = -1; }), HasSubstr("top_k"));
  EXPECT_THAT(error([](auto&, auto& r) { r.top_p = 0; }), HasSubstr("top_p"));
  EXPECT_THAT(error([](auto&, auto& r) { r.min_p = 2; }), HasSubstr("min_p"));
  EXPECT_THAT(error([](auto&, auto& r) { r.repetition_penalty = 0; }), HasSubstr("repetition_penalty"));
  EXPECT_THAT(error([](auto&, auto& r) { r.presence_penalty = kInf; }), HasSubstr("presence_penalty"));
  EXPECT_THAT(error([](auto&, auto& r) { r.frequency_penalty = kNan; }), HasSubstr("frequency_penalty"));
  EXPECT_THAT(error([](auto&, auto& r) { r.num_top = kMaxTopTokens + 1; }), HasSubstr("num_top"));
  static const uint32_t words[2] = {1, 1};
  EXPECT_THAT(error([](auto&, auto& r) { r.mask = words; }), HasSubstr("mask"));
}

INSTANTIATE_TEST_SUITE_P(Variants, SampleTokensTest, ::testing::Values(&ref::SampleTokens, &cpu::SampleTokens));

// Every instruction set, with and without threads, gives the reference's bits.
TEST(SampleTokensCpuTest, IsBitForBitTheReference) {
  Random random(11);
  ThreadPool pool(2);
  for (int round = 0; round < 60; ++round) {
    const int64_t width = round % 20 == 19 ? 128'256 : random.Int(1, round % 2 == 0 ? 300 : 9'000);
    const SamplingBatch batch = RandomSampling(random, width, 3, width > 100'000 ? 4 : 12);
    const SamplingOutput expected = RunSampling(batch, &ref::SampleTokens);
    for (const CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512}) {
      SCOPED_TRACE(::testing::Message() << "round " << round << ", isa " << static_cast<int>(isa));
      ExpectSame(batch, expected, RunSampling(batch, &cpu::SampleTokens, {.isa = isa}));
      if (::testing::Test::HasFatalFailure()) return;
    }
    ExpectSame(batch, expected, RunSampling(batch, &cpu::SampleTokens, {.pool = &pool, .isa = DetectCpuIsa()}));
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace spl::kernels
