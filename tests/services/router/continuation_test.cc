#include "services/router/request/continuation.h"

#include <gtest/gtest.h>

#include <random>

#include "services/tokenizer/ids_only.h"

namespace spl::router {
namespace {

class ContinuationTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { tokenizer_ = tokenizer::Tokenizer::Load("models/splice-tiny").value().release(); }
  static void TearDownTestSuite() {
    delete tokenizer_;
    tokenizer_ = nullptr;
  }
  static std::vector<TokenId> Encode(const std::string& text) { return tokenizer_->Encode(text, {}).value(); }

  struct Shown {
    std::string text;
    std::vector<TokenId> ids;
    FinishReason reason = FinishReason::kNone;
    bool stopped_by_string = false;
  };
  // Feeds all ids; the last with `last`.
  static Shown Run(const std::vector<TokenId>& ids, const std::vector<std::string>& stop, FinishReason last) {
    GenerationRequest request;
    request.stop = stop;
    Continuation continuation(*tokenizer_, request);
    Shown shown;
    for (size_t i = 0; i < ids.size(); ++i) {
      Delta delta;
      EXPECT_TRUE(continuation.Append({.id = ids[i]}, i + 1 == ids.size() ? last : FinishReason::kNone, &delta).ok());
      shown.text += delta.text;
      for (const OutputToken& token : delta.tokens) shown.ids.push_back(token.id);
      if (delta.finish_reason != FinishReason::kNone) shown.reason = delta.finish_reason;
    }
    shown.stopped_by_string = continuation.stopped_by_string();
    return shown;
  }

  static const tokenizer::Tokenizer* tokenizer_;
};
const tokenizer::Tokenizer* ContinuationTest::tokenizer_ = nullptr;

TEST_F(ContinuationTest, WithoutStopEverythingIsShown) {
  const std::string text = "Grüße, 世界! 👋🏽 done";
  const Shown shown = Run(Encode(text), {}, FinishReason::kLength);
  EXPECT_EQ(shown.text, text);
  EXPECT_EQ(shown.ids, Encode(text));
  EXPECT_EQ(shown.reason, FinishReason::kLength);
}

TEST_F(ContinuationTest, EndTokenIsNoText) {
  std::vector<TokenId> ids = Encode("answer");
  const size_t num_text = ids.size();
  ids.push_back(Encode("x")[0]);  // a stop id that would be text
  const Shown shown = Run(ids, {}, FinishReason::kStop);
  EXPECT_EQ(shown.text, "answer");
  EXPECT_EQ(shown.ids.size(), num_text);
}

// Every stop string cut from a text, wherever the token edges are, ends it right before its first occurrence.
TEST_F(ContinuationTest, StopStringsAcrossTokenEdges) {
  const std::string text = "The committee met on 14 March; wörk on 世界 began. The end of the text.";
  const std::vector<TokenId> ids = Encode(text);
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    const size_t begin = random() % text.size();
    const size_t length = 1 + random() % 12;
    const std::string stop = text.substr(begin, length);
    const Shown shown = Run(ids, {stop, "never in there"}, FinishReason::kLength);
    EXPECT_EQ(shown.text, text.substr(0, text.find(stop))) << stop;
    EXPECT_EQ(shown.reason, FinishReason::kStop);
    EXPECT_TRUE(shown.stopped_by_string);
    ASSERT_LE(shown.ids.size(), ids.size());
    EXPECT_TRUE(std::equal(shown.ids.begin(), shown.ids.end(), ids.begin()));
    // The tokens shown cover the text shown (the last one may reach into the stop string).
    EXPECT_EQ(tokenizer_->Decode(shown.ids, {}).value().rfind(shown.text, 0), 0u);
  }
}

TEST_F(ContinuationTest, HeldBackTextIsShownAtTheEnd) {
  const Shown shown = Run(Encode("almost STO"), {"STOP"}, FinishReason::kLength);
  EXPECT_EQ(shown.text, "almost STO");
  EXPECT_EQ(shown.ids, Encode("almost STO"));
  EXPECT_FALSE(shown.stopped_by_string);
}

TEST_F(ContinuationTest, TokensAfterTheEndAreIgnored) {
  GenerationRequest request;
  Continuation continuation(*tokenizer_, request);
  Delta delta;
  EXPECT_TRUE(continuation.Append({.id = 300}, FinishReason::kLength, &delta).ok());
  Delta after;
  EXPECT_TRUE(continuation.Append({.id = 301}, FinishReason::kNone, &after).ok());
  EXPECT_TRUE(after.text.empty() && after.tokens.empty());
}

TEST_F(ContinuationTest, UnknownTokenIsInternal) {
  GenerationRequest request;
  Continuation continuation(*tokenizer_, request);
  Delta delta;
  EXPECT_EQ(continuation.Append({.id = 1 << 30}, FinishReason::kNone, &delta).code(), absl::StatusCode::kInternal);
}

// Models pad their vocabulary beyond the tokenizer's; what they sample there is a token without text.
TEST_F(ContinuationTest, PaddingOfTheVocabularyHasNoText) {
  GenerationRequest request;
  const uint32_t padded = static_cast<uint32_t>(tokenizer_->vocab_size()) + 10;
  Continuation continuation(*tokenizer_, request, padded);
  Delta delta;
  EXPECT_TRUE(continuation.Append({.id = static_cast<TokenId>(padded) - 1}, FinishReason::kNone, &delta).ok());
  EXPECT_EQ(delta.text, "");
  EXPECT_EQ(delta.tokens.size(), 1u);
  EXPECT_EQ(continuation.Append({.id = static_cast<TokenId>(padded)}, FinishReason::kNone, &delta).code(),
            absl::StatusCode::kInternal);
}

TEST_F(ContinuationTest, WithoutATokenizerIdsGoThrough) {
  const auto ids_only = tokenizer::MakeIdsOnlyTokenizer();
  GenerationRequest request;
  Continuation continuation(*ids_only, request, 100);
  Delta delta;
  EXPECT_TRUE(continuation.Append({.id = 99}, FinishReason::kNone, &delta).ok());
  EXPECT_TRUE(continuation.Append({.id = 0}, FinishReason::kLength, &delta).ok());
  EXPECT_EQ(delta.text, "");
  EXPECT_EQ(delta.tokens.size(), 2u);
  EXPECT_EQ(delta.finish_reason, FinishReason::kLength);
}

}  // namespace
}  // namespace spl::router
