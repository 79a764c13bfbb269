// The choice of a format: by the chat template, or by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/router/output_formats/registry.h"

namespace spl::router {
namespace {

using ::testing::HasSubstr;

std::string Choose(std::string_view chat_template, const OutputFormat& asked = {.tools = "auto", .reasoning = "auto"}) {
  const absl::StatusOr<OutputFormat> format = ChooseOutputFormat(asked, chat_template);
  return format.ok() ? format->tools + " " + format->reasoning : std::string(format.status().message());
}

constexpr char kGptOss[] = "{{ '<|start|>assistant<|channel|>final<|message|>' + text + '<|end|>' }} \"arguments\"";

TEST(OutputFormatChoiceTest, ByTheTemplate) {
  EXPECT_EQ(Choose("{{ x }}"), "none none");
  EXPECT_EQ(Choose("<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}</tool_call> <think>"),
            "hermes think");
  EXPECT_EQ(Choose("<tool_call>\n<function=f>\n<parameter=p> \"arguments\""), "qwen3_coder none");
  EXPECT_EQ(Choose("<tool_call>name <arg_key> <arg_value> \"arguments\""), "glm4 none");
  EXPECT_EQ(Choose("[TOOL_CALLS] ["), "mistral none");
  EXPECT_EQ(Choose("<|start_header_id|> tools {\"name\": name, \"parameters\": dictionary}"), "llama3_json none");
  EXPECT_EQ(Choose("<|start_header_id|> tools [func_name1(params_name1=params_value1)] \"parameters\""),
            "pythonic none");
  EXPECT_EQ(Choose("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool.type + '<｜tool▁sep｜>' '</think>'"),
            "deepseek think");
  EXPECT_EQ(Choose(kGptOss), "harmony harmony");
}

TEST(OutputFormatChoiceTest, ByName) {
  EXPECT_EQ(Choose("", {.tools = "hermes", .reasoning = "none"}), "hermes none");
  EXPECT_EQ(Choose("[TOOL_CALLS]", {.tools = "json", .reasoning = "auto"}), "json none");
  EXPECT_THAT(Choose("", {.tools = "x", .reasoning = "none"}),
              HasSubstr("--tool-parser is 'x', not one of auto, none, deepseek, glm4, harmony, hermes, json, pythonic, "
                        "llama3_json, mistral, qwen3_coder"));
  EXPECT_THAT(Choose("", {.tools = "none", .reasoning = "x"}), HasSubstr("--reasoning-parser is 'x'"));
}

TEST(OutputFormatChoiceTest, HarmonyIsForBothOrForNone) {
  EXPECT_EQ(Choose("", {.tools = "harmony", .reasoning = "auto"}), "harmony harmony");
  EXPECT_EQ(Choose("", {.tools = "auto", .reasoning = "harmony"}), "harmony harmony");
  EXPECT_EQ(Choose(kGptOss, {.tools = "none", .reasoning = "auto"}), "none harmony");
  EXPECT_EQ(Choose(kGptOss, {.tools = "none", .reasoning = "none"}), "none none");
  EXPECT_THAT(Choose(kGptOss, {.tools = "auto", .reasoning = "none"}), HasSubstr("choose it for both"));
  EXPECT_THAT(Choose("", {.tools = "hermes", .reasoning = "harmony"}), HasSubstr("choose it for both"));
  EXPECT_THAT(Choose(kGptOss, {.tools = "hermes", .reasoning = "auto"}), HasSubstr("choose it for both"));
}

TEST(OutputFormatChoiceTest, APromptMayEndInReasoning) {
  EXPECT_TRUE(EndsInReasoning({.reasoning = "think"}, "<|im_start|>assistant\n<think>\n"));
  EXPECT_FALSE(EndsInReasoning({.reasoning = "think"}, "<think>\n\n</think>\n\n"));
  EXPECT_FALSE(EndsInReasoning({.reasoning = "none"}, "<think>\n"));
  EXPECT_TRUE(EndsInReasoning({.reasoning = "harmony"}, "<|start|>assistant<|channel|>analysis<|message|>"));
  EXPECT_FALSE(EndsInReasoning({.reasoning = "harmony"}, "<|start|>assistant"));
}

TEST(OutputFormatChoiceTest, SpecialTokensAreInTheTextWhereTheyMeanSomething) {
  EXPECT_TRUE(NeedsSpecialTokens({.tools = "mistral"}, true));
  EXPECT_TRUE(NeedsSpecialTokens({.tools = "deepseek"}, true));
  EXPECT_TRUE(NeedsSpecialTokens({.tools = "pythonic"}, true));
  EXPECT_FALSE(NeedsSpecialTokens({.tools = "mistral"}, false));
  EXPECT_FALSE(NeedsSpecialTokens({.tools = "json"}, true));
  EXPECT_TRUE(NeedsSpecialTokens({.tools = "none", .reasoning = "harmony"}, false));
}

TEST(OutputFormatChoiceTest, NothingToParse) {
  EXPECT_EQ(MakeOutputParser({.tools = "hermes"}, nullptr, false), nullptr);
}

}  // namespace
}  // namespace spl::router
