// Comparing steps that choose tokens with the same steps over everything.
#include "tests/services/engine/engines_fixture.h"
#include "tests/support/seeded_random.h"

namespace spl::engine {
namespace {

using test::SeededRandom;

TEST(LogitAgreement, ByHand) {
  const std::vector<float> a = {3, 4, 0};
  LogitAgreement same = CompareLogits(a, a);
  EXPECT_NEAR(same.cosine, 1, 1e-12);
  EXPECT_TRUE(same.top1);
  EXPECT_EQ(same.top10, 1);
  const std::vector<float> b = {4, 3, 0};
  EXPECT_NEAR(CompareLogits(a, b).cosine, 24.0 / 25, 1e-12);
  EXPECT_FALSE(CompareLogits(a, b).top1);
  std::vector<float> falling(40), shifted(40);
  for (int i = 0; i < 40; ++i) {
    falling[static_cast<size_t>(i)] = static_cast<float>(-i);
    shifted[static_cast<size_t>((i + 3) % 40)] = static_cast<float>(-i);
  }
  EXPECT_NEAR(CompareLogits(shifted, falling).top10, 0.7, 1e-12);
}

class DecodeFidelityTest : public EnginesTest {
 protected:
  struct Seen {
    std::string selector;
    LogitAgreement agreement;
  };
  void StartWatched(double share) {
    DecodeEngineOptions options;
    options.fidelity = {
        .share = share, .interval = 4, .report = [this](std::string_view selector, const LogitAgreement& agreement) {
          seen_.push_back({std::string(selector), agreement});
        }};
    Start(8192, 8192, {}, options);
  }
  std::vector<Seen> seen_;  // by the engine thread; read when it has stopped
};

TEST_F(DecodeFidelityTest, WatchingChangesNoAnswer) {
  std::mt19937 random = SeededRandom("watched");
  const auto prompt = RandomPrompt(random, 500);
  for (const char* name : {"sparcas", "quest", "loopserve", "streaming"}) {
    DecodeOptions selection(name);
    selection.budget = 64;
    selection.recent = 16;
    LocalGeneratorOptions options;
    options.max_tokens = 4096;
    options.decode = selection;
    const Answer alone = Generate(options, prompt, WithLogprobs(41));
    StartWatched(1);
    seen_.clear();
    selection_ = selection;
    const auto outcome = Submit(prompt, Greedy(41));
    ASSERT_TRUE(outcome->Wait());
    ASSERT_TRUE(outcome->status.ok()) << outcome->status;
    EXPECT_EQ(outcome->tokens[0], alone.tokens) << name;
    StopAll();
    // 40 steps; LoopServe's first 16 tokens choose nothing.
    ASSERT_GE(seen_.size(), 5u) << name;
    ASSERT_LE(seen_.size(), 10u) << name;
    for (const Seen& s : seen_) {
      EXPECT_EQ(s.selector, name);
      EXPECT_GT(s.agreement.cosine, 0.2) << name;
      EXPECT_LE(s.agreement.cosine, 1 + 1e-9);
      EXPECT_LT(s.agreement.cosine, 1 - 1e-12) << name << ": compared with itself?";
    }
  }
}

TEST_F(DecodeFidelityTest, NothingToCompare) {
  std::mt19937 random = SeededRandom("not watched");
  const auto prompt = RandomPrompt(random, 200);
  DecodeOptions everything("sparcas");
  everything.budget = 300;
  for (const DecodeOptions& selection : {DecodeOptions("dense"), everything}) {
    StartWatched(1);
    selection_ = selection;
    EXPECT_TRUE(Submit(prompt, Greedy(30))->Wait());
    StopAll();
    EXPECT_TRUE(seen_.empty()) << selection.selector;
  }
  StartWatched(0);
  everything.budget = 32;
  selection_ = everything;
  EXPECT_TRUE(Submit(prompt, Greedy(30))->Wait());
  StopAll();
  EXPECT_TRUE(seen_.empty());
}

}  // namespace
}  // namespace spl::engine
