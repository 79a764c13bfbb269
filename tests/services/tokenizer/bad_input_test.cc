// What broken or unsupported tokenizer files get: an InvalidArgument that says what and where.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/base/status.h"
#include "services/tokenizer/tokenizer.h"
#include "tests/services/tokenizer/test_files.h"

namespace spl::tokenizer {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json Small() {
  return json::parse(R"({"added_tokens": [{"id": 4, "content": "<s>", "special": true, "normalized": false}],
    "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3}, "merges": ["a b"]}})");
}

std::string ErrorOf(const json& document) {
  const auto parsed = Tokenizer::FromJson(document.dump());
  if (parsed.ok()) return "no error";
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
  return MessageOf(parsed.status());
}

// The small tokenizer with the value at `path` replaced.
std::string ErrorWith(const std::string& path, const std::string& value) {
  json document = Small();
  document[json::json_pointer(path)] = json::parse(value);
  return ErrorOf(document);
}

TEST(BadInputTest, TheSmallOneItselfIsFine) {
  const auto tokenizer = Tokenizer::FromJson(Small().dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->Encode("ab<s>cx", {}).value(), (std::vector<TokenId>{2, 4, 3}));
  EXPECT_EQ((*tokenizer)->vocab_size(), 5);
  EXPECT_EQ((*tokenizer)->bos_id(), std::nullopt);
  EXPECT_TRUE((*tokenizer)->eos_ids().empty());
}

TEST(BadInputTest, BrokenJson) {
  for (const char* text : {"", "{", "[]", "5", "{\"model\": \xFF}", "nul"}) {
    const auto parsed = Tokenizer::FromJson(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_THAT(MessageOf(parsed.status()), HasSubstr("tokenizer.json"));
  }
  EXPECT_FALSE(Tokenizer::FromJson(std::string(200000, '[')).ok());
}

TEST(BadInputTest, Model) {
  EXPECT_THAT(ErrorOf(json::object()), HasSubstr("tokenizer.json: model: is missing"));
  EXPECT_THAT(ErrorWith("/model", "[]"), HasSubstr("model: must be an object, got a list"));
  EXPECT_THAT(ErrorWith("/model/type", "\"Unigram\""), HasSubstr("model: the model \"Unigram\" is not supported"));
  EXPECT_THAT(ErrorWith("/model/vocab", "[]"), HasSubstr("model.vocab: must be an object"));
  EXPECT_THAT(ErrorWith("/model/vocab", "{}"), HasSubstr("model.vocab is empty"));
  EXPECT_THAT(ErrorWith("/model/vocab/a", "\"0\""),
              HasSubstr("model.vocab[\"a\"]: must be an integer between 0 and 4194303, got a string"));
  EXPECT_THAT(ErrorWith("/model/vocab/a", "1"), HasSubstr("gives the id 1 to"));
  EXPECT_THAT(ErrorWith("/model/vocab/a", "-1"),
              HasSubstr("model.vocab[\"a\"]: must be an integer between 0 and 4194303, got -1"));
  EXPECT_THAT(ErrorWith("/model/vocab/a", "99999999999"), HasSubstr("got 99999999999"));
  EXPECT_THAT(ErrorWith("/model/vocab/a", "18446744073709551615"), HasSubstr("got 18446744073709551615"));
  EXPECT_THAT(ErrorWith("/model/merges", "{}"), HasSubstr("model.merges: must be a list"));
  EXPECT_THAT(ErrorWith("/model/merges/0", "\"a x\""), HasSubstr("model.merges[0] names \"x\""));
  EXPECT_THAT(ErrorWith("/model/merges/0", "\"b c\""), HasSubstr("model.merges[0] makes \"bc\""));
  EXPECT_THAT(ErrorWith("/model/merges/0", "\"ab\""), HasSubstr("must be two tokens"));
  EXPECT_THAT(ErrorWith("/model/merges/0", "\"a b c\""), HasSubstr("must be two tokens"));
  EXPECT_THAT(ErrorWith("/model/merges/0", "[\"a\"]"), HasSubstr("must be two strings"));
  EXPECT_THAT(ErrorWith("/model/merges/0", "7"), HasSubstr("model.merges[0]: must be"));
  EXPECT_THAT(ErrorWith("/model/dropout", "0.1"), HasSubstr("model.dropout is not supported"));
  EXPECT_THAT(ErrorWith("/model/end_of_word_suffix", "\"</w>\""),
              HasSubstr("model.end_of_word_suffix is not supported"));
  EXPECT_THAT(ErrorWith("/model/unk_token", "\"<unk>\""), HasSubstr("unk_token is \"<unk>\""));
  EXPECT_THAT(ErrorWith("/model/byte_fallback", "1"), HasSubstr("model.byte_fallback: must be true or false, got 1"));
}

TEST(BadInputTest, AddedTokens) {
  EXPECT_THAT(ErrorWith("/added_tokens", "{}"), HasSubstr("added_tokens: must be a list"));
  EXPECT_THAT(ErrorWith("/added_tokens/0", "{\"id\": 9}"), HasSubstr("added_tokens[0].content: is missing"));
  EXPECT_THAT(ErrorWith("/added_tokens/0/id", "null"), HasSubstr("the id of \"<s>\" is outside"));
  EXPECT_THAT(ErrorWith("/added_tokens/0/id", "4194304"), HasSubstr("outside 0 to"));
  EXPECT_THAT(ErrorWith("/added_tokens/0/id", "2"), HasSubstr("gives the id 2 to \"<s>\", but it is \"ab\""));
  EXPECT_THAT(ErrorWith("/added_tokens/0/content", "\"a\""), HasSubstr("gives \"a\" the id 4, but it is 0"));
  EXPECT_THAT(ErrorWith("/added_tokens/0/content", "\"\""), HasSubstr("content is empty"));
  EXPECT_THAT(ErrorWith("/added_tokens/1", R"({"id": 5, "content": "<s>"})"), HasSubstr("adds \"<s>\" a second time"));
  EXPECT_THAT(ErrorWith("/added_tokens/1", R"({"id": 4, "content": "<t>"})"), HasSubstr("gives the id 4 to \"<t>\""));
}

TEST(BadInputTest, Components) {
  EXPECT_THAT(ErrorWith("/normalizer", R"({"type": "NFKC"})"),
              HasSubstr("normalizer: the normalizer \"NFKC\" is not supported"));
  EXPECT_THAT(ErrorWith("/normalizer", R"({"type": "Sequence", "normalizers": [{"type": "Lowercase"}]})"),
              HasSubstr("normalizer.normalizers[0]: the normalizer \"Lowercase\""));
  EXPECT_THAT(ErrorWith("/normalizer", "{}"), HasSubstr("normalizer.type: is missing"));
  EXPECT_THAT(ErrorWith("/normalizer", R"({"type": "Replace", "pattern": {"String": ""}, "content": "x"})"),
              HasSubstr("normalizer.pattern.String is empty"));
  EXPECT_THAT(ErrorWith("/pre_tokenizer", R"({"type": "BertPreTokenizer"})"),
              HasSubstr("the pre-tokenizer \"BertPreTokenizer\""));
  EXPECT_THAT(ErrorWith("/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated"})"),
              HasSubstr("pre_tokenizer.pattern: the pattern \"(a\" does not compile"));
  EXPECT_THAT(
      ErrorWith("/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "[a&&b]"}, "behavior": "Isolated"})"),
      HasSubstr("the set operation &&"));
  EXPECT_THAT(ErrorWith("/pre_tokenizer", R"({"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Other"})"),
              HasSubstr("the behavior \"Other\""));
  EXPECT_THAT(ErrorWith("/pre_tokenizer", R"({"type": "Split", "pattern": "a", "behavior": "Isolated"})"),
              HasSubstr("pre_tokenizer.pattern: must be an object"));
  EXPECT_THAT(ErrorWith("/post_processor", R"({"type": "BertProcessing"})"),
              HasSubstr("the post-processor \"BertProcessing\""));
  EXPECT_THAT(ErrorWith("/post_processor", R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "q"}}],
                                               "special_tokens": {}})"),
              HasSubstr("special_tokens.q: is missing"));
  EXPECT_THAT(ErrorWith("/post_processor", R"({"type": "TemplateProcessing", "single": []})"), HasSubstr("0 times"));
  EXPECT_THAT(ErrorWith("/post_processor", R"({"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "q"}}, {"Sequence": {"id": "A"}}], "special_tokens": {"q": {"ids": [77]}}})"),
              HasSubstr("names the id 77"));
  EXPECT_THAT(ErrorWith("/decoder", R"({"type": "WordPiece"})"),
              HasSubstr("the decoder \"WordPiece\" is not supported"));
  EXPECT_THAT(ErrorWith("/decoder", R"({"type": "Strip", "content": " ", "start": -1, "stop": 0})"),
              HasSubstr("start and stop"));
}

TEST(BadInputTest, NestingIsBounded) {
  for (const auto& [path, list] :
       {std::pair("/normalizer", "normalizers"), std::pair("/pre_tokenizer", "pretokenizers"),
        std::pair("/post_processor", "processors"), std::pair("/decoder", "decoders")}) {
    json nested = {{"type", "Sequence"}, {list, json::array()}};
    for (int i = 0; i < 100; ++i) nested = {{"type", "Sequence"}, {list, json::array({nested})}};
    EXPECT_THAT(ErrorWith(path, nested.dump()), HasSubstr("nested more than 16 deep"));
  }
}

class ModelFolderTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = std::filesystem::path(testing::TempDir()) / testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(dir_);
    std::filesystem::create_directories(dir_);
    Write("tokenizer.json", Small().dump());
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  void Write(const std::string& name, const std::string& text) { std::ofstream(dir_ / name, std::ios::binary) << text; }
  absl::StatusOr<std::unique_ptr<Tokenizer>> Load() { return Tokenizer::Load(dir_.string()); }
  std::vector<TokenId> Eos() {
    const auto tokenizer = Load();
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    return {(*tokenizer)->eos_ids().begin(), (*tokenizer)->eos_ids().end()};
  }
  std::string Error() {
    const auto tokenizer = Load();
    return tokenizer.ok() ? "no error" : MessageOf(tokenizer.status());
  }
  std::filesystem::path dir_;
};

TEST_F(ModelFolderTest, MissingFolder) {
  EXPECT_EQ(Tokenizer::Load((dir_ / "none").string()).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ModelFolderTest, TokensAtTheEdges) {
  EXPECT_TRUE(Eos().empty());
  Write("tokenizer_config.json", R"({"bos_token": {"content": "<s>"}, "eos_token": "c"})");
  EXPECT_EQ((*Load())->bos_id(), 4);
  EXPECT_EQ(Eos(), (std::vector<TokenId>{3}));
  Write("config.json", R"({"eos_token_id": 2, "bos_token_id": 1})");
  EXPECT_EQ(Eos(), (std::vector<TokenId>{2}));
  Write("generation_config.json", R"({"eos_token_id": [1, 0, 1]})");
  EXPECT_EQ(Eos(), (std::vector<TokenId>{1, 0}));
  Write("tokenizer_config.json", R"({"bos_token": null})");
  EXPECT_EQ((*Load())->bos_id(), std::nullopt);
}

TEST_F(ModelFolderTest, TokensThatOnlyTheConfigLists) {
  Write("tokenizer_config.json", R"({"added_tokens_decoder": {"4": {"content": "<s>", "special": true},
                                     "7": {"content": "<extra>", "special": true}}})");
  const auto tokenizer = Load();
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->vocab_size(), 8);
  EXPECT_EQ((*tokenizer)->Encode("a<extra>", {}).value(), (std::vector<TokenId>{0, 7}));
  const std::vector<TokenId> hole = {6};
  EXPECT_FALSE((*tokenizer)->Decode(hole, {}).ok());
}

TEST_F(ModelFolderTest, BadFilesNameThemselves) {
  Write("tokenizer_config.json", R"({"eos_token": "<nope>"})");
  EXPECT_THAT(Error(), HasSubstr("tokenizer_config.json: eos_token is \"<nope>\""));
  Write("tokenizer_config.json", R"({"added_tokens_decoder": {"x": {"content": "q"}}})");
  EXPECT_THAT(Error(), HasSubstr("added_tokens_decoder[\"x\"]: the key is not a token id"));
  Write("tokenizer_config.json", R"({"added_tokens_decoder": {"3": {"content": "q"}}})");
  EXPECT_THAT(Error(), HasSubstr("gives the id 3 to \"q\", but it is \"c\""));
  Write("tokenizer_config.json", "[]");
  EXPECT_THAT(Error(), HasSubstr("tokenizer_config.json: must be an object"));
  Write("tokenizer_config.json", "{}");
  Write("generation_config.json", R"({"eos_token_id": 99})");
  EXPECT_THAT(Error(), HasSubstr("generation_config.json: eos_token_id names the id 99"));
  Write("generation_config.json", R"({"eos_token_id": "2"})");
  EXPECT_THAT(Error(), HasSubstr("eos_token_id: must be one or more token ids"));
  Write("generation_config.json", "{");
  EXPECT_THAT(Error(), HasSubstr("generation_config.json: is not JSON"));
}

}  // namespace
}  // namespace spl::tokenizer
