// Forced calls in every format: whatever the model would rather write, the answer is valid calls.
#include "services/router/output_formats/forced_calls.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "services/grammar/grammar_limits.h"
#include "services/router/output_formats/registry.h"
#include "tests/services/grammar/vocabularies.h"
#include "tests/services/router/answer_writer.h"
#include "tests/support/json_schemas.h"

namespace spl::router {
namespace {

using nlohmann::json;

constexpr char kTools[] = R"([
  {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object",
    "properties": {
      "city": {"type": "string"},
      "kind": {"type": "string", "enum": ["rain", "snow \"x\"", "true"]},
      "days": {"type": "integer", "minimum": 1, "maximum": 9},
      "exact": {"type": "boolean"},
      "nothing": {"type": "null"},
      "code": {"type": "string", "pattern": "^[a-z]{2,4}$"},
      "note": {"type": "string", "minLength": 1, "maxLength": 20},
      "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
      "at": {"$ref": "#/$defs/point"},
      "any": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    "required": ["city", "days", "exact", "code", "note", "at", "any"],
    "additionalProperties": false,
    "$defs": {"point": {"type": "object", "properties": {"name": {"type": "string"}, "flat": {"type": "boolean"}},
                        "required": ["name"], "additionalProperties": false}}}}},
  {"type": "function", "function": {"name": "weather_stop"}},
  {"type": "function", "function": {"name": "maybe", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer", "minimum": -9, "maximum": 99}, "b": {"type": "string"}}, "additionalProperties": false}}}])";

struct FormatCase {
  const char* format;
  std::vector<std::string> tags;  // special tokens of some models
};

const FormatCase kFormats[] = {
    {"hermes", {"<tool_call>", "</tool_call>"}},
    {"json", {}},
    {"llama3_json", {}},
    {"mistral", {"[TOOL_CALLS]"}},
    {"mistral", {"[TOOL_CALLS]", "[ARGS]"}},
    {"mistral", {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}},
    {"deepseek",
     {"<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
      "<｜tool▁calls▁end｜>"}},
    {"harmony", {"<|channel|>", "<|constrain|>", "<|message|>"}},
    {"pythonic", {}},
    {"qwen3_coder", {"<tool_call>", "</tool_call>"}},
    {"glm4", {"<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}},
};

const AnswerWriter::Words kWords = {
    .traps = {"</parameter>",
              "\n</parameter>\n",
              "</arg_value>",
              "</tool_call>",
              "\"",
              "\\\"",
              "'",
              "}",
              "]",
              ")",
              "\n",
              "<",
              "</",
              "[TOOL_CALLS]",
              "<|call|>",
              "<｜tool▁call▁end｜>",
              "ä世",
              " 7",
              "True",
              "null",
              "\\/",
              "{\"name\": \"maybe\", \"arguments\": {}}",
              "```",
              "', b='"},
    .ends = {"\"", "\n</parameter>\n", "</arg_value>\n", "}", "]", ")", "\n```", "</function>\n", "</tool_call>"}};

// The message of an answer, fed in pieces; 0: as a whole. Calls are [name, arguments], put together.
json MessageOf(const std::string& format, const std::string& text, uint64_t seed) {
  const CallableTools tools{.json = kTools, .make_id = [] { return "call_123456789"; }, .forced = true};
  const auto parser =
      MakeOutputParser({.tools = format, .reasoning = format == "harmony" ? "harmony" : "none"}, &tools, false);
  std::mt19937_64 random(seed);
  OutputDelta delta;
  for (size_t at = 0; at < text.size();) {
    const size_t size = seed == 0 ? text.size() : 1 + random() % 9;
    parser->Feed(std::string_view(text).substr(at, size), &delta);
    at += size;
  }
  parser->Finish(&delta);
  json calls = json::array();
  for (const ToolCallDelta& call : delta.tool_calls) {
    if (!call.id.empty()) calls.push_back({call.name, ""});
    calls.back()[1] = calls.back()[1].get<std::string>() + call.arguments;
  }
  return {{"reasoning", delta.reasoning}, {"content", delta.content}, {"calls", calls}};
}

void ExpectValidCalls(const json& message, bool one) {
  EXPECT_EQ(message["content"], "");
  EXPECT_EQ(message["reasoning"], "");
  EXPECT_GE(message["calls"].size(), 1u);
  if (one) {
    EXPECT_EQ(message["calls"].size(), 1u);
  }
  for (const json& call : message["calls"]) {
    bool known = false;
    for (const json& tool : json::parse(kTools)) {
      if (tool["function"]["name"] != call[0]) continue;
      known = true;
      const json parameters = tool["function"].value(
          "parameters", json{{"type", "object"}, {"properties", json::object()}, {"additionalProperties", false}});
      const json arguments = json::parse(call[1].get<std::string>(), nullptr, false);
      EXPECT_FALSE(arguments.is_discarded()) << call;
      EXPECT_TRUE(testing::IsValid(arguments, parameters, parameters)) << call;
    }
    EXPECT_TRUE(known) << call;
  }
}

absl::StatusOr<std::shared_ptr<const grammar::TokenGrammar>> CompileCalls(const std::string& format,
                                                                          const ForcedCalls& calls,
                                                                          const std::map<int32_t, std::string>& tags) {
  const auto special = [&](std::string_view text) -> std::optional<int32_t> {
    for (const auto& [id, tag] : tags) {
      if (tag == text) return id;
    }
    return std::nullopt;
  };
  auto tag = ForcedCallsTag(format, kTools, calls, special);
  if (!tag.ok()) return tag.status();
  const grammar::GrammarSpec spec{grammar::GrammarKind::kStructuralTag, *std::move(tag), false};
  if (const absl::Status checked = grammar::CheckGrammarSpec(spec); !checked.ok()) return checked;
  return grammar::Tiny().compiler->Compile(spec);
}

class ForcedCallsTest : public ::testing::TestWithParam<FormatCase> {
 protected:
  void SetUp() override {
    if (!grammar::HaveGrammarPlugin()) GTEST_SKIP() << "no libsplice_xgrammar.so: its archive was not fetched";
    ASSERT_NE(grammar::Tiny().compiler, nullptr);
    std::printf("seed %llu\n", static_cast<unsigned long long>(grammar::kSeed));
  }
};

// SPLICE_FORCED_CALLS: how many answers instead of 40.
TEST_P(ForcedCallsTest, EveryAnswerIsValidCallsHoweverItIsCut) {
  const char* const asked = std::getenv("SPLICE_FORCED_CALLS");
  const int num_answers = asked == nullptr ? 40 : std::atoi(asked);
  for (const bool with_tokens : {false, true}) {
    std::map<int32_t, std::string> tags;
    constexpr int32_t kSpecial[] = {4088, 4090, 4092, 4093, 4094, 4095};
    for (size_t i = 0; with_tokens && i < GetParam().tags.size(); ++i) tags[kSpecial[i]] = GetParam().tags[i];
    for (const bool one : {true, false}) {
      const auto grammar = CompileCalls(GetParam().format, {.one = one}, tags);
      ASSERT_TRUE(grammar.ok()) << grammar.status();
      int ended = 0;
      for (int i = 0; i < num_answers && !HasFailure(); ++i) {
        const uint64_t seed = grammar::kSeed + static_cast<uint64_t>(i);
        const std::optional<std::string> text = AnswerWriter(**grammar, tags, kWords, seed).Write();
        if (!text.has_value()) continue;
        ++ended;
        const json whole = MessageOf(GetParam().format, *text, 0);
        ExpectValidCalls(whole, one || std::string(GetParam().format) == "harmony");
        EXPECT_EQ(MessageOf(GetParam().format, *text, seed), whole);
        EXPECT_FALSE(HasFailure()) << "seed " << seed << "\n" << *text;
      }
      std::printf("%s, tags %s: %d of %d answers ended, with valid calls\n", GetParam().format,
                  with_tokens ? "tokens" : "spelt", ended, num_answers);
      EXPECT_GT(ended, num_answers * 3 / 4);
    }
  }
}

TEST_P(ForcedCallsTest, ANamedToolIsTheOneThatIsCalled) {
  const auto grammar = CompileCalls(GetParam().format, {.name = "maybe", .one = true}, {});
  ASSERT_TRUE(grammar.ok()) << grammar.status();
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const std::optional<std::string> text = AnswerWriter(**grammar, {}, kWords, seed).Write();
    if (text.has_value()) {
      EXPECT_EQ(MessageOf(GetParam().format, *text, 0)["calls"].at(0)[0], "maybe") << *text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, ForcedCallsTest, ::testing::ValuesIn(kFormats), [](const auto& info) {
  return std::string(info.param.format) + "_" + std::to_string(info.index);
});

// As Python reads them, the first escape is two characters and the second one an error.
TEST(ForcedCallsReadingTest, TextsOfPythonicCallsAreJson) {
  const json message = MessageOf("pythonic", R"([maybe(b="\/\ud800", a=1)])", 0);
  EXPECT_EQ(message["calls"], json::array({{"maybe", R"({"b": "\/\ud800", "a": 1})"}}));
  EXPECT_EQ(message["content"], "");
}

TEST(ForcedCallsTagTest, TagsThatAreSpecialTokensAreTokens) {
  const auto special = [](std::string_view text) {
    return text == "<|message|>" ? std::optional<int32_t>(7) : std::nullopt;
  };
  const auto tag = ForcedCallsTag("harmony", kTools, {.name = "weather_stop", .one = true}, special);
  ASSERT_TRUE(tag.ok()) << tag.status();
  EXPECT_NE(tag->find(R"({"type":"token","token":7})"), std::string::npos) << *tag;
  EXPECT_NE(tag->find("<|channel|>commentary to=functions.weather_stop <|constrain|>json"), std::string::npos) << *tag;
}

TEST(ForcedCallsTagTest, WhatAFormatHasNoPlaceForIsRefused) {
  struct Case {
    const char *format, *parameters, *reason;
    const char* name = "f";
  };
  const Case cases[] = {
      {"pythonic", R"({"type":"object"})", "its name is none", "a-b"},
      {"pythonic", R"({"type":"object","properties":{"a b":{}}})", "\"a b\""},
      {"glm4", R"({"type":"object","properties":{"<a>":{}}})", "\"<a>\""},
      {"qwen3_coder", R"({"anyOf":[{"type":"object"}]})", "\"type\": \"object\""},
      {"qwen3_coder", R"({"type":"object","minProperties":1})", "\"minProperties\""},
      {"qwen3_coder", R"({"type":"object","properties":{"a":{"$ref":"#"}}})", "$defs"},
      {"glm4", R"({"type":"object","required":["a"]})", "\"required\" names \"a\""},
      {"none", R"({"type":"object"})", "--tool-parser"},
  };
  for (const Case& c : cases) {
    const std::string tools = std::string(R"([{"type":"function","function":{"name":")") + c.name +
                              R"(","parameters":)" + c.parameters + "}}]";
    const auto tag = ForcedCallsTag(c.format, tools, {.name = c.name, .one = true}, nullptr);
    ASSERT_FALSE(tag.ok()) << c.parameters;
    EXPECT_NE(tag.status().message().find(c.reason), std::string::npos) << tag.status();
  }
}

}  // namespace
}  // namespace spl::router
