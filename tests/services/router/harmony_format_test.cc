#include <gtest/gtest.h>

#include "tests/services/router/output_format_cases.h"

namespace spl::router {
namespace {

const OutputFormat kHarmony{.tools = "harmony", .reasoning = "harmony"};

TEST(HarmonyFormatTest, Messages) {
  ExpectCases(
      kHarmony,
      {{"reasoning and answer",
        "<|channel|>analysis<|message|>User asks: 2 + 2?<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = "
        "4.\n",
        {"User asks: 2 + 2?", "2 + 2 = 4.\n", {}}},
       {"the end is there", "<|channel|>final<|message|>Yes.<|return|>", {"", "Yes.", {}}},
       {"words behind the channel",
        "<|channel|>analysis?<|message|>a<|end|><|start|>assistant<|channel|>final json<|message|>{}<|return|>",
        {"a", "{}", {}}},
       {"messages of one kind",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Plan.<|end|>\n<|start|>assistant<|channel|>final<|message|>"
        "x",
        {"a\n\nb", "Plan.\n\nx", {}}},
       {"no channel", "<|message|>Yes.<|end|>", {"", "Yes.", {}}},
       {"no start of the next message", "<|channel|>analysis<|message|>a<|channel|>final<|message|>b", {"a", "b", {}}},
       {"no messages", " Just <b>text</b> and <|x ", {"", " Just <b>text</b> and <|x ", {}}},
       {"text behind a message", "<|channel|>analysis<|message|>a<|end|> b", {"a", "b", {}}},
       {"cut off in reasoning", "<|channel|>analysis<|message|>a < b", {"a < b", "", {}}},
       {"cut off in a header",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|chan",
        {"a", "<|start|>assistant<|chan", {}}},
       {"begun by the prompt", "so<|end|><|start|>assistant<|channel|>final<|message|>x", {"so", "x", {}}, true},
       {"an answer that the prompt began", "and so on.<|return|>", {"", "and so on.", {}}},
       {"a header without a message",
        "<|channel|>2?<|end|><|start|>assistant<|channel|>analysis<|message|>a",
        {"a", "<|channel|>2?", {}}},
       {"a channel twice", "<|channel|>commentary<|channel|>analysis<|message|>a<|end|>", {"a", "", {}}},
       {"another channel", "<|channel|>news<|message|>a<|end|>", {"", "<|channel|>news<|message|>a", {}}},
       {"white space", " \n", {"", " \n", {}}},
       {"nothing", "", {"", "", {}}}});
}

TEST(HarmonyFormatTest, Calls) {
  ExpectCases(
      kHarmony,
      {{"recorded",
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.get_weather <|constrain|>json<|message|>{\"location\":\"San Francisco\"}<|call|>",
        {"Need to use function get_weather.", "", {"get_weather({\"location\":\"San Francisco\"})"}}},
       {"the recipient first, no end",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
        "{\"x\": \"<|call|>}\"}",
        {"a", "", {"f({\"x\": \"<|call|>}\"})"}}},
       {"the answer begins with the recipient",
        " to=functions.f<|channel|>commentary<|constrain|>json<|message|>{}<|call|>",
        {"", "", {"f({})"}}},
       {"a plan, and two calls",
        "<|channel|>commentary<|message|>Plan.<|end|><|start|>assistant<|channel|>commentary to=functions.a "
        "<|constrain|>json<|message|>{\"x\": 1}<|call|><|start|>assistant<|channel|>analysis "
        "to=functions.b<|message|>\n"
        "{} <|end|>",
        {"", "Plan.", {"a({\"x\": 1})", "b({})"}}},
       {"no arguments", "<|channel|>commentary to=functions.a<|message|> <|call|>", {"", "", {"a({})"}}},
       {"no JSON",
        "<|channel|>commentary to=functions.a code<|message|>print(1)<|call|>",
        {"", "<|channel|>commentary to=functions.a code<|message|>print(1)", {}}},
       {"another recipient",
        "<|channel|>analysis to=browser.search code<|message|>{\"q\": 1}<|call|>",
        {"", "<|channel|>analysis to=browser.search code<|message|>{\"q\": 1}", {}}},
       {"malformed once it is certain",
        "<|channel|>commentary to=functions.a<|message|>{\"x\": <|call|><|channel|>final<|message|>y",
        {"", "y", {"a({\"x\": )"}}},
       {"text behind the arguments",
        "<|channel|>commentary to=functions.a<|message|>{} and more<|call|>",
        {"", "and more", {"a({})"}}},
       {"cut off in the arguments",
        "<|channel|>commentary to=functions.a <|constrain|>json<|message|>{\"x\": \"y",
        {"", "", {"a({\"x\": \"y)"}}},
       {"cut off in front of the arguments",
        "<|channel|>commentary to=functions.a <|constrain|>json<|message|>",
        {"", "<|channel|>commentary to=functions.a <|constrain|>json<|message|>", {}}}});
}

// Without tools a message to a function is content, and reasoning is still found.
TEST(HarmonyFormatTest, WithoutTools) {
  const auto parser = MakeOutputParser(kHarmony, nullptr, false);
  OutputDelta all;
  parser->Feed("<|channel|>analysis<|message|>a<|end|><|channel|>commentary to=functions.f<|message|>{}<|call|>", &all);
  parser->Finish(&all);
  EXPECT_EQ(all.reasoning, "a");
  EXPECT_EQ(all.content, "<|channel|>commentary to=functions.f<|message|>{}");
  EXPECT_TRUE(all.tool_calls.empty());
}

// A header that goes on and on is none: the answer is shown.
TEST(HarmonyFormatTest, ALongHeaderIsText) {
  const std::string text = "<|channel|>" + std::string(800, 'x');
  ExpectCases(kHarmony, {{"no message", text, {"", text, {}}}});
  EXPECT_NE(DeltasOf(kHarmony, {text}, false).front().content, "");
}

}  // namespace
}  // namespace spl::router
