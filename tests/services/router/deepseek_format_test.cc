#include <gtest/gtest.h>

#include "tests/services/router/output_format_cases.h"

namespace spl::router {
namespace {

TEST(DeepSeekFormatTest, V3AndR1) {
  ExpectCases(
      {.tools = "deepseek"},
      {{"one call",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": "
        "\"Zürich\"}\n"
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        {"", "", {"get_weather({\"city\": \"Zürich\"})"}}},
       {"two calls and text in front",
        "I look.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{\"x\": \"```\"}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>b\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        {"", "I look.", {"a({\"x\": \"```\"})", "b({})"}}},
       {"without fences",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n{\"x\": 1}<｜tool▁call▁end｜>",
        {"", "", {"a({\"x\": 1})"}}},
       {"no end tags",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{\"x\": 1}\n```",
        {"", "", {"a({\"x\": 1})"}}},
       {"cut off in the fence",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{\"x\": 1}\n``",
        {"", "", {"a({\"x\": 1})"}}},
       {"cut off in the name",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_we",
        {"", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_we", {}}},
       {"no JSON",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\nplease<｜tool▁call▁end｜>",
        {"", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\nplease<｜tool▁call▁end｜>", {}}}});
}

TEST(DeepSeekFormatTest, V31) {
  ExpectCases(
      {.tools = "deepseek"},
      {{"one call",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Bern\"}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        {"", "", {"get_weather({\"city\": \"Bern\"})"}}},
       {"two calls, text around",
        "Hm. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{\"x\": \"}<｜tool▁call▁end｜\"}"
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜> b <｜tool▁sep｜> {}<｜tool▁call▁end｜><｜tool▁calls▁end｜>\nDone.",
        {"", "Hm.Done.", {"a({\"x\": \"}<｜tool▁call▁end｜\"})", "b({})"}}},
       {"no arguments",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        {"", "", {"a({})"}}},
       {"no end of a call",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁begin｜>b<｜tool▁sep｜>{}"
        "<｜tool▁calls▁end｜>",
        {"", "", {"a({})", "b({})"}}},
       {"malformed once it is certain",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{\"x\": <｜tool▁call▁end｜><｜tool▁calls▁end｜>y",
        {"", "y", {"a({\"x\": )"}}},
       {"text behind the arguments",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{} x<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        {"", "x", {"a({})"}}},
       {"cut off in the arguments",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{\"x\": [1, ",
        {"", "", {"a({\"x\": [1, )"}}},
       {"cut off in an end tag",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁en",
        {"", "", {"a({})"}}},
       {"cut off in the second call",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>b",
        {"", "<｜tool▁call▁begin｜>b", {"a({})"}}},
       {"no call",
        "a <｜tool▁calls▁begin｜> b <｜tool▁calls▁end｜>",
        {"", "a <｜tool▁calls▁begin｜> b <｜tool▁calls▁end｜>", {}}},
       {"a name that is none",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}",
        {"", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}", {}}},
       {"only text", "a <｜tool▁call and <｜tool▁calls▁begin｜", {"", "a <｜tool▁call and <｜tool▁calls▁begin｜", {}}},
       {"white space", " \n", {"", " \n", {}}}});
}

TEST(DeepSeekFormatTest, ReasoningThenCalls) {
  ExpectCases({.tools = "deepseek", .reasoning = "think"},
              {{"R1-0528",
                "<think>\nI call it.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n"
                "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                {"I call it.", "", {"a({})"}}},
               {"V3.1, begun by the prompt",
                "so</think>Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
                {"so", "Yes.", {"a({})"}},
                true}});
}

// A name, or a type, that goes on and on is none: the answer is shown.
TEST(DeepSeekFormatTest, ALongNameIsText) {
  const std::string text = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" + std::string(600, 'x');
  ExpectCases({.tools = "deepseek"}, {{"no separator", text, {"", text, {}}}});
  EXPECT_NE(DeltasOf({.tools = "deepseek"}, {text}, false).front().content, "");
}

}  // namespace
}  // namespace spl::router
