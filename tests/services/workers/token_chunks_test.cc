// Messages of a token stream: with the decode method `adaptive` they say which steps their tokens came from.
#include "services/decode/token_chunks.h"

#include <gtest/gtest.h>

namespace spl::decode {
namespace {

using engine::DecodeToken;
using engine::StepKind;

TEST(TokenChunks, TellTheStepsOfAdaptiveAlone) {
  Metrics metrics;
  const TokenChunks chunks(engine::StepCosts({{4096, {{1, 0.01, 0.005, 0.002}, {2, 0.02, 0.01, 0.004}}}}), metrics);
  const auto count = [&](const char* step) {
    return metrics.Counter("splice_decode_adaptive_tokens_total", "", {{"step", step}}).Value();
  };
  engine::DecodeChoiceCounter fixed, adaptive;
  const DecodeToken plain[] = {{.fork = 1, .token = {.token = 7}}};
  const v1::StreamChunk without = chunks.Of(plain, fixed);
  ASSERT_EQ(without.tokens_size(), 1);
  EXPECT_EQ(without.tokens(0).index(), 1u);
  EXPECT_EQ(without.tokens(0).token().token_id(), 7u);
  EXPECT_FALSE(without.has_choice());
  EXPECT_EQ(count("dense") + count("chosen"), 0);

  const DecodeToken first[] = {{.fork = 0, .step = {.kind = StepKind::kDense}},
                               {.fork = 1, .step = {.kind = StepKind::kChosen}},
                               {.fork = 0, .step = {.kind = StepKind::kChosen, .guarded_heads = 3, .least_mass = 0.5}}};
  const v1::StreamChunk one = chunks.Of(first, adaptive);
  EXPECT_EQ(one.choice().dense_tokens(), 1u);
  EXPECT_EQ(one.choice().chosen_tokens(), 2u);
  EXPECT_EQ(one.choice().changes(), 1u) << "of continuation 0; the other one began so";
  EXPECT_EQ(one.choice().guarded_heads(), 3u);
  EXPECT_EQ(one.choice().least_mass(), 0.5);
  const DecodeToken second[] = {
      {.fork = 1, .step = {.kind = StepKind::kDense, .guarded_heads = 1, .least_mass = 0.75}}};
  const v1::StreamChunk two = chunks.Of(second, adaptive);
  EXPECT_EQ(two.choice().dense_tokens(), 2u) << "sums so far";
  EXPECT_EQ(two.choice().chosen_tokens(), 2u);
  EXPECT_EQ(two.choice().changes(), 2u);
  EXPECT_EQ(two.choice().guarded_heads(), 4u);
  EXPECT_EQ(two.choice().least_mass(), 0.5);
  EXPECT_EQ(count("dense"), 2);
  EXPECT_EQ(count("chosen"), 2);
  EXPECT_EQ(metrics.Counter("splice_decode_guarded_heads_total", "").Value(), 4);
}

}  // namespace
}  // namespace spl::decode
