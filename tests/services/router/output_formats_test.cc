// Recorded answers in each format, whole and cut at every place: the parsed message must not depend on the cuts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "services/router/output_formats/registry.h"
#include "services/router/output_formats/think_tags.h"
#include "services/router/output_formats/tool_call_json.h"
#include "tests/services/router/output_format_cases.h"

namespace spl::router {
namespace {

TEST(OutputFormatsTest, Hermes) {
  ExpectCases(
      {.tools = "hermes"},
      {{"one call",
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\"}}\n</tool_call>",
        {"", "", {"weather({\"city\": \"Zürich\"})"}}},
       {"two calls",
        "<tool_call>\n{\"name\": \"a\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"b\", "
        "\"arguments\": "
        "{\"x\": [1, {\"y\": \"}\"}]}}\n</tool_call>",
        {"", "", {"a({})", "b({\"x\": [1, {\"y\": \"}\"}]})"}}},
       {"text around",
        "I look.\n\n<tool_call>{\"name\": \"a\"}</tool_call>\n\n Done. \n",
        {"", "I look.Done. \n", {"a({})"}}},
       {"only text", "a < b, <tool> and <tool_cal\n ", {"", "a < b, <tool> and <tool_cal\n ", {}}},
       {"nothing", "", {"", "", {}}},
       {"white space", " \n ", {"", " \n ", {}}},
       {"no end, but complete",
        "x <tool_call>{\"name\": \"a\", \"arguments\": {\"n\": 123456789012345678901234567890}}",
        {"", "x", {"a({\"n\": 123456789012345678901234567890})"}}},
       {"cut off in the end tag", "<tool_call>{\"name\": \"a\"}\n</tool_ca", {"", "", {"a({})"}}},
       {"cut off in the call",
        "x \n<tool_call>\n{\"name\": \"a\", \"argu",
        {"", "x \n<tool_call>\n{\"name\": \"a\", \"argu", {}}},
       {"no JSON", "<tool_call>weather()</tool_call>.", {"", "<tool_call>weather()</tool_call>.", {}}},
       {"no name",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        {"", "<tool_call>{\"arguments\": {}}</tool_call>", {}}},
       {"no end of the object",
        "<tool_call>{\"name\": \"a\", \"arguments\": {\"x\": 1}\n</tool_call>",
        {"", "", {"a({\"x\": 1})"}}},
       {"no end tag",
        "<tool_call>{\"name\": \"a\", \"arguments\": {}}\n<tool_call>{\"name\": \"b\"}</tool_call>",
        {"", "", {"a({})", "b({})"}}},
       {"text in front of the end tag",
        "<tool_call>{\"name\": \"a\", \"arguments\": {}} x</tool_call> y",
        {"", "xy", {"a({})"}}},
       {"a bracket too many", "<tool_call>{\"name\": \"a\", \"arguments\": {}}}</tool_call>", {"", "}", {"a({})"}}},
       {"members in front and behind",
        "<tool_call>{\"id\": 7, \"name\": \"a\", \"arguments\": {}, \"x\": {\"y\": [1]}}</tool_call>",
        {"", "", {"a({})"}}},
       {"text behind the arguments",
        "<tool_call>{\"name\": \"a\", \"arguments\": {} x}</tool_call>",
        {"", "x}", {"a({})"}}},
       {"the name last",
        "<tool_call>{\"arguments\": {\"x\": 1}, \"name\": \"a\"}</tool_call>",
        {"", "", {"a({\"x\": 1})"}}},
       {"a name with escapes",
        "<tool_call>{\"name\": \"\\u0061\\\"\", \"arguments\": {}}</tool_call>",
        {"", "", {"a\"({})"}}},
       {"tags in a text",
        "<tool_call>{\"name\": \"a\", \"arguments\": {\"x\": \"</tool_call>\\\"{<tool_call>\"}}</tool_call>!",
        {"", "!", {"a({\"x\": \"</tool_call>\\\"{<tool_call>\"})"}}},
       {"malformed once it is certain",
        "<tool_call>{\"name\": \"a\", \"arguments\": {\"x\": oops}}</tool_call>",
        {"", "", {"a({\"x\": oops})"}}},
       {"malformed, and not closed",
        "<tool_call>{\"name\": \"a\", \"arguments\": {\"x\": </tool_call> <tool_call>{\"name\": \"b\"}</tool_call>",
        {"", "", {"a({\"x\": )", "b({})"}}},
       {"cut off in the arguments",
        "<tool_call>{\"name\": \"a\", \"arguments\": {\"x\": \"y",
        {"", "", {"a({\"x\": \"y)"}}},
       {"cut off behind the arguments",
        "<tool_call>{\"name\": \"a\", \"arguments\": {\"x\": 1}, \"id\": \"7",
        {"", ", \"id\": \"7", {"a({\"x\": 1})"}}},
       {"no object of arguments",
        "<tool_call>{\"name\": \"a\", \"arguments\": [1]}</tool_call>",
        {"", "<tool_call>{\"name\": \"a\", \"arguments\": [1]}</tool_call>", {}}},
       {"arguments as text",
        "<tool_call>{\"name\": \"a\", \"arguments\": \"{\\\"x\\\": 1}\"}</tool_call>",
        {"", "", {"a({\"x\": 1})"}}},
       {"a bad call between good ones",
        "<tool_call>{\"name\": \"a\"}</tool_call> <tool_call>{</tool_call> <tool_call>{\"name\": \"b\"}</tool_call>",
        {"", "<tool_call>{</tool_call>", {"a({})", "b({})"}}},
       {"the end alone", "</tool_call> x", {"", "</tool_call> x", {}}}});
}

TEST(OutputFormatsTest, Llama3Json) {
  ExpectCases(
      {.tools = "llama3_json"},
      {{"one call",
        "{\"name\": \"weather\", \"parameters\": {\"city\": \"Bern\"}}",
        {"", "", {"weather({\"city\": \"Bern\"})"}}},
       {"behind the tag",
        "<|python_tag|>{\"name\": \"a\", \"parameters\": {\"x\": \"};{\"}}",
        {"", "", {"a({\"x\": \"};{\"})"}}},
       {"two calls",
        "{\"name\": \"a\", \"parameters\": {}} ; {\"name\": \"b\", \"arguments\": {\"x\": 2}}\n",
        {"", "", {"a({})", "b({\"x\": 2})"}}},
       {"text behind", "{\"name\": \"a\", \"parameters\": {}}\nDone. \n", {"", "Done. \n", {"a({})"}}},
       {"text behind a semicolon", "{\"name\": \"a\", \"parameters\": {}}; and", {"", "; and", {"a({})"}}},
       {"only text",
        "Hello {\"name\": \"a\", \"parameters\": {}}",
        {"", "Hello {\"name\": \"a\", \"parameters\": {}}", {}}},
       {"other JSON", "{\"name\": \"Bob\", \"age\": 5} x", {"", "{\"name\": \"Bob\", \"age\": 5} x", {}}},
       {"cut off", " {\"name\": \"a\", \"parameters\": {\"x", {"", " {\"name\": \"a\", \"parameters\": {\"x", {}}},
       {"no JSON", "{weather} is nice", {"", "{weather} is nice", {}}},
       {"a part of the tag", "<|pyth", {"", "<|pyth", {}}},
       {"the tag alone", "<|python_tag|>print(1)", {"", "<|python_tag|>print(1)", {}}},
       {"white space", " \n", {"", " \n", {}}}});
}

TEST(OutputFormatsTest, Mistral) {
  ExpectCases(
      {.tools = "mistral"},
      {{"a list",
        "[TOOL_CALLS] [{\"name\": \"a\", \"arguments\": {\"x\": \"]}\"}}, {\"name\": \"b\"}]",
        {"", "", {"a({\"x\": \"]}\"})", "b({})"}}},
       {"text in front", "I look. [TOOL_CALLS][{\"name\": \"a\"}]\n", {"", "I look.", {"a({})"}}},
       {"names",
        "[TOOL_CALLS]get_weather{\"city\": \"Bern\"}[TOOL_CALLS]b {}",
        {"", "", {"get_weather({\"city\": \"Bern\"})", "b({})"}}},
       {"names and arguments",
        "[TOOL_CALLS]a[ARGS]{\"x\": [1]}\n[TOOL_CALLS]b[ARGS] {}",
        {"", "", {"a({\"x\": [1]})", "b({})"}}},
       {"names, ids and arguments",
        "[TOOL_CALLS]a[CALL_ID]VvvODy9mT[ARGS]{\"x\": 1}[TOOL_CALLS]b [CALL_ID]123456789 [ARGS] {}",
        {"", "", {"a({\"x\": 1})", "b({})"}}},
       {"an id and no arguments", "[TOOL_CALLS]a[CALL_ID]1 x", {"", "[TOOL_CALLS]a[CALL_ID]1 x", {}}},
       {"cut off in the id", "[TOOL_CALLS]a[CALL_ID]12", {"", "[TOOL_CALLS]a[CALL_ID]12", {}}},
       {"cut off in the tag of an id", "[TOOL_CALLS]a[CAL", {"", "[TOOL_CALLS]a[CAL", {}}},
       {"text behind", "[TOOL_CALLS]a{} Done.", {"", "Done.", {"a({})"}}},
       {"only text", "[TOOL] and [TOOL_CALL", {"", "[TOOL] and [TOOL_CALL", {}}},
       {"no list of calls", "x [TOOL_CALLS] [1, 2] y", {"", "x [TOOL_CALLS] [1, 2] y", {}}},
       {"the second is no call", "[TOOL_CALLS][{\"name\": \"a\"}, {}]", {"", "{}]", {"a({})"}}},
       {"the first is no call",
        "[TOOL_CALLS][ {}, {\"name\": \"a\"}]",
        {"", "[TOOL_CALLS][ {}, {\"name\": \"a\"}]", {}}},
       {"a list that is read while it is written",
        "[TOOL_CALLS] [{\"name\": \"a\", \"arguments\": {\"x\": 1}}, {\"name\": \"b\", \"arguments\": {}, \"id\": 3}] "
        "y",
        {"", "y", {"a({\"x\": 1})", "b({})"}}},
       {"no comma", "[TOOL_CALLS][{\"name\": \"a\"} {\"name\": \"b\"}]", {"", "{\"name\": \"b\"}]", {"a({})"}}},
       {"an empty list", "[TOOL_CALLS][]", {"", "[TOOL_CALLS][]", {}}},
       {"cut off in the list", "[TOOL_CALLS] [{\"name\": \"a\"}, ", {"", "", {"a({})"}}},
       {"cut off in the second call",
        "[TOOL_CALLS] [{\"name\": \"a\"}, {\"name\": \"b",
        {"", "{\"name\": \"b", {"a({})"}}},
       {"cut off in the first call", "x [TOOL_CALLS] [{\"name\": \"a", {"", "x [TOOL_CALLS] [{\"name\": \"a", {}}},
       {"cut off in the arguments", "[TOOL_CALLS]a[ARGS]{\"x\": ", {"", "", {"a({\"x\": )"}}},
       {"cut off in the arguments of a list",
        "[TOOL_CALLS] [{\"name\": \"a\", \"arguments\": {\"x\": [",
        {"", "", {"a({\"x\": [)"}}},
       {"cut off in the name", " [TOOL_CALLS]a", {"", " [TOOL_CALLS]a", {}}},
       {"no name", "[TOOL_CALLS]! [TOOL_CALLS]a{}", {"", "[TOOL_CALLS]!", {"a({})"}}},
       {"malformed once it is certain", "[TOOL_CALLS]a{x}", {"", "", {"a({x})"}}},
       {"white space", " \n", {"", " \n", {}}}});
}

TEST(OutputFormatsTest, Qwen3Coder) {
  const std::string two_lines =
      "<tool_call>\n<function=edit>\n<parameter=path>\na/b \"c\".py\n</parameter>\n<parameter=line>\n12\n</parameter>\n"
      "<parameter=text>\nx = <b>\n  y\n\n</parameter>\n</function>\n</tool_call>";
  ExpectCases(
      {.tools = "qwen3_coder"},
      {{"one call",
        two_lines,
        {"", "", {"edit({\"path\": \"a/b \\\"c\\\".py\", \"line\": 12, \"text\": \"x = <b>\\n  y\\n\"})"}}},
       {"texts of type string stay texts",
        "<tool_call><function=edit><parameter=path>12</parameter><parameter=note>null</parameter></function></"
        "tool_call>",
        {"", "", {"edit({\"path\": \"12\", \"note\": \"null\"})"}}},
       {"JSON and Python",
        "<tool_call><function=bare><parameter=a>[1, {\"x\": 2}]</parameter><parameter=b>True</parameter><parameter=c>"
        "None</parameter><parameter=d>no JSON</parameter></function></tool_call>",
        {"", "", {"bare({\"a\": [1, {\"x\": 2}], \"b\": true, \"c\": null, \"d\": \"no JSON\"})"}}},
       {"no parameters, two calls",
        "Ok.\n<tool_call>\n<function=bare>\n</function>\n</tool_call>\n<tool_call><function=f></function></"
        "tool_call>\n",
        {"", "Ok.", {"bare({})", "f({})"}}},
       {"a parameter twice",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        {"", "", {"f({\"a\": 2})"}}},
       {"no function",
        "<tool_call>{\"name\": \"f\"}</tool_call>",
        {"", "<tool_call>{\"name\": \"f\"}</tool_call>", {}}},
       {"no end of a parameter",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        {"", "<tool_call><function=f><parameter=a>1</function></tool_call>", {}}},
       {"text between",
        "<tool_call><function=f>x</function></tool_call>",
        {"", "<tool_call><function=f>x</function></tool_call>", {}}},
       {"cut off", "<tool_call><function=f><parameter=a>1", {"", "<tool_call><function=f><parameter=a>1", {}}},
       {"cut off behind the function", "<tool_call>\n<function=f>\n</function>\n", {"", "", {"f({})"}}}});
}

TEST(OutputFormatsTest, Glm4) {
  ExpectCases(
      {.tools = "glm4"},
      {{"one call",
        "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>12</arg_value>\n<arg_key>line</arg_key>\n<arg_value>3"
        "</arg_value>\n</tool_call>",
        {"", "", {"edit({\"path\": \"12\", \"line\": 3})"}}},
       {"without line ends",
        "Ok. <tool_call>edit<arg_key>line</arg_key><arg_value>[1] </arg_value></tool_call>",
        {"", "Ok.", {"edit({\"line\": [1] })"}}},
       {"no arguments, two calls",
        "<tool_call>a\n</tool_call>\n<tool_call>b</tool_call>",
        {"", "", {"a({})", "b({})"}}},
       {"no name", "<tool_call>\n</tool_call>", {"", "<tool_call>\n</tool_call>", {}}},
       {"JSON", "<tool_call>{\"name\": \"f\"}</tool_call>", {"", "<tool_call>{\"name\": \"f\"}</tool_call>", {}}},
       {"no value",
        "<tool_call>f<arg_key>a</arg_key></tool_call>",
        {"", "<tool_call>f<arg_key>a</arg_key></tool_call>", {}}},
       {"text behind",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>",
        {"", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>", {}}}});
}

TEST(OutputFormatsTest, IdsOfMistralHaveNineCharacters) {
  const CallableTools tools{.json = kCaseTools, .make_id = [] { return "call_0123456789abcdef"; }};
  const auto parser = MakeOutputParser({.tools = "mistral"}, &tools, false);
  OutputDelta all;
  parser->Feed("[TOOL_CALLS]a{}", &all);
  parser->Finish(&all);
  ASSERT_EQ(all.tool_calls.size(), 1u);
  EXPECT_EQ(all.tool_calls[0].id, "789abcdef");
}

TEST(OutputFormatsTest, ThinkTags) {
  ExpectCases({.reasoning = "think"},
              {{"reasoning and answer", "<think>\nhm, é\n</think>\n\nThe answer.\n", {"hm, é", "The answer.\n", {}}},
               {"begun by the prompt", "\nhm\n\nhm</think>\nThe answer", {"hm\n\nhm", "The answer", {}}, true},
               {"nothing thought", "<think>\n\n</think>\n\nThe answer", {"", "The answer", {}}},
               {"no tags", "The answer <think>is</think> 5", {"", "The answer <think>is</think> 5", {}}},
               {"cut off", "<think>a < b and </thin", {"a < b and </thin", "", {}}},
               {"cut off behind", "<think>a</think>\n", {"a", "", {}}},
               {"a part of the tag", " <thi", {"", " <thi", {}}},
               {"two of them", "<think>a</think>b<think>c</think>", {"a", "b<think>c</think>", {}}},
               {"white space", "\n ", {"", "\n ", {}}},
               {"white space of reasoning", "\n ", {"", "", {}}, true}});
}

TEST(OutputFormatsTest, ReasoningThenCalls) {
  ExpectCases(
      {.tools = "hermes", .reasoning = "think"},
      {{"both",
        "<think>\nI call <tool_call>{\"name\": \"no\"}</tool_call>.\n</think>\n\n<tool_call>\n{\"name\": \"a\"}\n"
        "</tool_call>",
        {"I call <tool_call>{\"name\": \"no\"}</tool_call>.", "", {"a({})"}}},
       {"no reasoning", "Hm. <tool_call>{\"name\": \"a\"}</tool_call>", {"", "Hm.", {"a({})"}}},
       {"only reasoning", "<think>a", {"a", "", {}}}});
}

// Random bytes of what formats consist of: every byte of an answer without calls and reasoning is content.
TEST(OutputFormatsTest, NoTextIsLost) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const char* const parts[] = {"<tool_call>",
                               "</tool_call>",
                               "[TOOL_CALLS]",
                               "{",
                               "}",
                               "\"",
                               "name",
                               ":",
                               " ",
                               "\n",
                               ";",
                               "<",
                               "x",
                               "\\",
                               "[",
                               "]",
                               "(",
                               ")",
                               "f(a=1)",
                               "```json\n",
                               "<｜tool▁calls▁begin｜>",
                               "<｜tool▁call▁begin｜>",
                               "f<｜tool▁sep｜>",
                               "<｜tool▁call▁end｜>",
                               "<|python_start|>",
                               "<|channel|>analysis",
                               "<|message|>",
                               "<|end|>",
                               "<|start|>",
                               "to=functions.f"};
  for (int i = 0; i < 2000; ++i) {
    std::string text;
    for (unsigned n = random() % 16; n > 0; --n) text += parts[random() % std::size(parts)];
    for (const std::string tools :
         {"deepseek", "glm4", "harmony", "hermes", "json", "llama3_json", "mistral", "pythonic", "qwen3_coder"}) {
      const OutputFormat format{.tools = tools, .reasoning = tools == "harmony" ? "harmony" : "none"};
      const Message whole = ParsePieces(format, {text}, false);
      const bool is_message = tools == "harmony" && text.find("<|") != std::string::npos;
      EXPECT_TRUE(whole.content == text || !whole.calls.empty() || is_message)
          << tools << ": " << text << " became " << whole;
      std::vector<std::string_view> bytes;
      for (size_t at = 0; at < text.size(); ++at) bytes.push_back(std::string_view(text).substr(at, 1));
      EXPECT_EQ(ParsePieces(format, bytes, false), whole) << tools << ": " << text;
    }
  }
}

TEST(OutputFormatsTest, CallsOfAnySize) {
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  const auto call = ReadToolCall("{\"name\": \"f\", \"arguments\": {\"x\": " + deep + "}}", true);
  ASSERT_TRUE(call.has_value());
  EXPECT_EQ(call->arguments, "{\"x\": " + deep + "}");
  std::string wide = "{\"name\": \"f\", \"arguments\": {";
  for (int i = 0; i < 200'000; ++i) wide += (i > 0 ? ",\"k" : "\"k") + std::to_string(i) + "\":1";
  EXPECT_TRUE(ReadToolCall(wide + "}}", true).has_value());
}

}  // namespace
}  // namespace spl::router
