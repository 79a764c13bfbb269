// Text from a model in this process: what becomes of special tokens, of methods, and of the model's sampling.
#include "tools/cli/text_generator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/paths.h"
#include "tests/support/temp_dir.h"

namespace spl::cli {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

SourceFlags Tiny(const std::string& dir = test::kTinyModel) {
  SourceFlags flags;
  flags.model.dir = dir;
  flags.backend = "cpu";
  flags.num_threads = 1;
  return flags;
}

absl::StatusOr<TextResult> Ask(const SourceFlags& flags, const TextRequest& request) {
  auto generator = MakeLocalTextGenerator(flags);
  if (!generator.ok()) return generator.status();
  return (*generator)->Generate(request, [](const std::string&) { return true; });
}

// A message that spells special tokens may not speak as the system, unless the flag says so.
TEST(LocalTextGeneratorTest, MessagesSpellSpecialTokensAsText) {
  const auto prompt_tokens = [](const std::string& content, bool special) {
    SourceFlags flags = Tiny();
    flags.special_tokens_in_text = special;
    const auto result =
        Ask(flags, {.messages = json::array({{{"role", "user"}, {"content", content}}}), .max_tokens = 1});
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->prompt_tokens : 0;
  };
  const int64_t plain = prompt_tokens("a", false);
  EXPECT_EQ(prompt_tokens("a<|im_end|>", true), plain + 1) << "one special token";
  EXPECT_GT(prompt_tokens("a<|im_end|>", false), plain + 2) << "its characters";
}

TEST(LocalTextGeneratorTest, RefusesMethodsThatItDoesNotRun) {
  for (const auto& [reuse, decode] : {std::pair{"samkv", ""}, {"", "sparcas"}}) {
    const auto refused = Ask(Tiny(), {.text = "a", .max_tokens = 1, .reuse = reuse, .decode = decode});
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << reuse << decode;
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("--endpoint"));
  }
  for (const auto& [reuse, decode] : {std::pair{"exact", "dense"}, {"auto", "auto"}})
    EXPECT_TRUE(Ask(Tiny(), {.text = "a", .max_tokens = 1, .reuse = reuse, .decode = decode}).ok()) << reuse << decode;
}

// A folder like splice-tiny's whose generation_config.json says `config`.
std::string FolderWith(const testing::TempDir& dir, const std::string& config) {
  for (const auto& file : std::filesystem::directory_iterator(test::kTinyModel)) {
    if (file.path().filename() != "generation_config.json")
      std::filesystem::create_symlink(std::filesystem::absolute(file.path()),
                                      std::filesystem::path(dir.path()) / file.path().filename());
  }
  std::ofstream(dir.path() + "/generation_config.json") << config;
  return dir.path();
}

TEST(LocalTextGeneratorTest, SamplesAsTheModelRecommends) {
  // top_k 1 makes temperature 2 greedy.
  const testing::TempDir top, hot;
  const SourceFlags narrow = Tiny(FolderWith(top, R"({"temperature": 2.0, "top_k": 1})"));
  const SourceFlags wide = Tiny(FolderWith(hot, R"({"temperature": 2.0})"));
  TextRequest request{.text = "The ship", .max_tokens = 24, .model_sampling = true, .ignore_eos = true};
  request.temperature = std::nullopt;
  const auto text = [](const SourceFlags& flags, const TextRequest& asked) {
    const auto result = Ask(flags, asked);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->text : "";
  };
  TextRequest greedy = request;
  greedy.temperature = 0;
  const std::string likeliest = text(Tiny(), greedy);
  EXPECT_EQ(text(Tiny(), request), likeliest) << "splice-tiny says do_sample: false";
  EXPECT_EQ(text(narrow, request), likeliest);
  EXPECT_NE(text(wide, request), likeliest);
  EXPECT_EQ(text(wide, greedy), likeliest) << "the request's temperature goes first";
  SourceFlags none = narrow;
  none.generation_config = "none";
  EXPECT_NE(text(none, request), likeliest) << "temperature 1 and all tokens";
  // An evaluation asks for no model's sampling.
  EXPECT_EQ(text(wide, {.text = "The ship", .max_tokens = 24, .ignore_eos = true}), likeliest);
}

TEST(TextResultTest, TheRateOfAnAnswerInOnePieceIsThatOfTheWhole) {
  TextResult streamed{.completion_tokens = 11, .ttft_s = 1, .total_s = 2, .num_pieces = 11};
  EXPECT_DOUBLE_EQ(streamed.tokens_per_s(), 10);
  const TextResult at_once{.completion_tokens = 11, .ttft_s = 1.9999, .total_s = 2, .num_pieces = 1};
  EXPECT_DOUBLE_EQ(at_once.tokens_per_s(), 5.5);
  EXPECT_DOUBLE_EQ(TextResult{}.tokens_per_s(), 0);
}

}  // namespace
}  // namespace spl::cli
