// splice-tiny's tokenizer against ids that the reference made, line by line.
#include <gtest/gtest.h>

#include <map>

#include "services/base/status.h"
#include "services/tokenizer/tokenizer.h"
#include "tests/services/tokenizer/test_files.h"

namespace spl::tokenizer {
namespace {

class GoldenTest : public testing::Test {
 protected:
  void SetUp() override {
    if (SharedDir().empty()) GTEST_SKIP() << "no ../shared and no SPLICE_SHARED_DIR";
    auto loaded = Tokenizer::Load(kTinyModel);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    tokenizer_ = *std::move(loaded);
  }
  std::vector<TokenId> Encode(const std::string& text, const EncodeOptions& options) {
    auto ids = tokenizer_->Encode(text, options);
    EXPECT_TRUE(ids.ok()) << ids.status();
    return ids.ok() ? *ids : std::vector<TokenId>();
  }
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(GoldenTest, EveryLineOfText) {
  const auto lines = ReadJsonLines(SharedDir() + "/golden/tokenizer.jsonl");
  ASSERT_GE(lines.size(), 100u);
  for (const auto& line : lines) {
    const auto text = line["text"].get<std::string>();
    const auto ids = line["ids"].get<std::vector<TokenId>>();
    EXPECT_EQ(Encode(text, {}), ids) << line.dump();
    EXPECT_EQ(Encode(text, {.add_special_tokens = true}), line["ids_with_bos"].get<std::vector<TokenId>>());
    const auto decoded = tokenizer_->Decode(ids, {.skip_special_tokens = false});
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, line["decoded"].get<std::string>());
  }
}

TEST_F(GoldenTest, EveryStreamOfText) {
  for (const auto& line : ReadJsonLines(SharedDir() + "/golden/tokenizer.jsonl")) {
    StreamDecoder stream(*tokenizer_, {.skip_special_tokens = false});
    std::string joined;
    for (const TokenId id : line["ids"].get<std::vector<TokenId>>()) {
      const auto piece = stream.Append(id);
      ASSERT_TRUE(piece.ok()) << piece.status();
      joined += *piece;
    }
    joined += stream.Finish();
    EXPECT_EQ(joined, line["decoded"].get<std::string>());
  }
}

TEST_F(GoldenTest, EveryRenderedPrompt) {
  const auto lines = ReadJsonLines(SharedDir() + "/golden/chat_template.jsonl");
  ASSERT_GE(lines.size(), 10u);
  for (const auto& line : lines) {
    EXPECT_EQ(Encode(line["rendered"].get<std::string>(), {}), line["ids"].get<std::vector<TokenId>>()) << line.dump();
  }
}

TEST_F(GoldenTest, SpecialTokens) {
  EXPECT_EQ(tokenizer_->vocab_size(), 4096);
  EXPECT_EQ(tokenizer_->bos_id(), 4088);
  EXPECT_EQ(std::vector<TokenId>(tokenizer_->eos_ids().begin(), tokenizer_->eos_ids().end()),
            (std::vector<TokenId>{4091, 4089}));
  EXPECT_TRUE(tokenizer_->IsSpecial(4091));
  EXPECT_FALSE(tokenizer_->IsSpecial(4087));
  EXPECT_FALSE(tokenizer_->IsSpecial(-1));
  EXPECT_FALSE(tokenizer_->IsSpecial(4096));
  EXPECT_EQ(tokenizer_->IdOf("<|im_end|>"), 4091);
  EXPECT_EQ(tokenizer_->Piece(4091), "<|im_end|>");
  EXPECT_EQ(tokenizer_->Piece(258),
            "\xC4\xA0"
            "a");
  EXPECT_EQ(tokenizer_->Piece(4096), "");
}

}  // namespace
}  // namespace spl::tokenizer
