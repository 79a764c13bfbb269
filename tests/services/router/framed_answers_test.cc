// Answers in a given form behind a format's header: whatever the model thinks in front, the content is what was asked
// for.
#include "services/router/output_formats/framed_answers.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "services/grammar/grammar_limits.h"
#include "services/grammar/tag_part.h"
#include "tests/services/router/answer_writer.h"
#include "tests/support/json_schemas.h"

namespace spl::router {
namespace {

using grammar::GrammarKind;
using nlohmann::json;

const OutputFormat kHarmony{.tools = "harmony", .reasoning = "harmony"};

const AnswerWriter::Words kWords = {
    .traps = {"final", "analysis", "<|end|>", "<|return|>", "<|start|>assistant<|channel|>final<|message|>",
              "<|channel|>analysis<|message|>", "<|message|>{}", "\"", "}", "<", "<|", "\\u0041", " x", "{\"a\": 1}"},
    .ends = {"final", "<|message|>", "<|end|>", "\"", "}", "]"}};

const std::map<int32_t, std::string> kTags = {
    {4088, "<|channel|>"}, {4090, "<|constrain|>"}, {4092, "<|message|>"}, {4093, "<|start|>"}, {4094, "<|end|>"}};

struct Form {
  const char* name;
  grammar::GrammarSpec spec;
};

const Form kForms[] = {
    {"object", {GrammarKind::kJsonObject, "", false}},
    {"strict",
     {GrammarKind::kJsonSchema,
      R"({"type":"object","properties":{"a":{"type":"string"},"n":{"type":"integer"},"s":{"type":"string","maxLength":9}},)"
      R"("required":["a","s"]})",
      true}},
    {"open", {GrammarKind::kJsonSchema, R"({"type":"object","properties":{"a":{"type":"string"}}})", false}},
    {"regex", {GrammarKind::kRegex, "[a-f<|>]{2,30}", false}},
    {"choice", {GrammarKind::kChoice, R"(["left", "<|end|>", "say \"x\""])", false}},
    {"grammar", {GrammarKind::kGrammar, R"(root ::= "<" [a-c|]{1,20} ">")", false}},
};

void ExpectFits(const grammar::GrammarSpec& spec, const std::string& content) {
  const json value = json::parse(content, nullptr, false);
  switch (spec.kind) {
    case GrammarKind::kJsonObject:
      EXPECT_TRUE(value.is_object()) << content;
      return;
    case GrammarKind::kJsonSchema:
      EXPECT_FALSE(value.is_discarded()) << content;
      EXPECT_TRUE(testing::IsValid(value, json::parse(spec.text), json::parse(spec.text))) << content;
      return;
    case GrammarKind::kRegex:
      EXPECT_TRUE(std::regex_match(content, std::regex(spec.text))) << content;
      return;
    case GrammarKind::kChoice: {
      const json choices = json::parse(spec.text);
      EXPECT_NE(std::find(choices.begin(), choices.end(), json(content)), choices.end()) << content;
      return;
    }
    default:
      EXPECT_TRUE(std::regex_match(content, std::regex("<[a-c|]{1,20}>"))) << content;
  }
}

OutputDelta Read(const std::string& text, uint64_t seed) {
  const auto parser = MakeFramedParser(kHarmony, false);
  std::mt19937_64 random(seed);
  OutputDelta out;
  for (size_t at = 0; at < text.size();) {
    const size_t size = seed == 0 ? text.size() : 1 + random() % 9;
    parser->Feed(std::string_view(text).substr(at, size), &out);
    at += size;
  }
  parser->Finish(&out);
  return out;
}

class FramedAnswersTest : public ::testing::TestWithParam<Form> {};

TEST_P(FramedAnswersTest, TheContentIsInItsFormHoweverItIsCut) {
  if (!grammar::HaveGrammarPlugin()) GTEST_SKIP() << "no libsplice_xgrammar.so: its archive was not fetched";
  ASSERT_NE(grammar::Tiny().compiler, nullptr);
  std::printf("seed %llu\n", static_cast<unsigned long long>(grammar::kSeed));
  const auto content = grammar::TagPartOf(GetParam().spec);
  ASSERT_TRUE(content.ok()) << content.status();
  const bool is_json =
      GetParam().spec.kind == GrammarKind::kJsonObject || GetParam().spec.kind == GrammarKind::kJsonSchema;
  for (const bool with_tokens : {false, true}) {
    const std::map<int32_t, std::string> tags = with_tokens ? kTags : std::map<int32_t, std::string>{};
    const auto special = [&](std::string_view text) -> std::optional<int32_t> {
      for (const auto& [id, tag] : tags) {
        if (tag == text) return id;
      }
      return std::nullopt;
    };
    const json tag = {{"type", "structural_tag"}, {"format", FramedAnswer(kHarmony, *content, is_json, special)}};
    const grammar::GrammarSpec spec{GrammarKind::kStructuralTag, tag.dump(), false};
    ASSERT_TRUE(grammar::CheckGrammarSpec(spec).ok()) << grammar::CheckGrammarSpec(spec);
    const auto grammar = grammar::Tiny().compiler->Compile(spec);
    ASSERT_TRUE(grammar.ok()) << grammar.status();
    int ended = 0, reasoned = 0;
    for (uint64_t seed = 1; seed <= 40 && !HasFailure(); ++seed) {
      const std::optional<std::string> text = AnswerWriter(**grammar, tags, kWords, grammar::kSeed + seed).Write();
      if (!text.has_value()) continue;
      ++ended;
      const OutputDelta whole = Read(*text, 0), cut = Read(*text, seed);
      EXPECT_EQ(whole.content, cut.content);
      EXPECT_EQ(whole.reasoning, cut.reasoning);
      for (const auto& [id, tag] : kTags) EXPECT_EQ(whole.reasoning.find(tag), std::string::npos) << whole.reasoning;
      reasoned += !whole.reasoning.empty();
      ExpectFits(GetParam().spec, whole.content);
      EXPECT_FALSE(HasFailure()) << "seed " << seed << "\n" << *text;
    }
    std::printf("%s, tags %s: %d of 40 answers ended, %d of them with reasoning\n", GetParam().name,
                with_tokens ? "tokens" : "spelt", ended, reasoned);
    EXPECT_GT(ended, 20);
    EXPECT_GT(reasoned, 0);
    EXPECT_LT(reasoned, ended);
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, FramedAnswersTest, ::testing::ValuesIn(kForms),
                         [](const auto& info) { return info.param.name; });

// Tags that stand in the content are content: it goes on to the end.
TEST(FramedParserTest, TagsInTheContentAreContent) {
  const std::string content = R"({"a": "<|end|><|start|>assistant<|channel|>analysis<|message|>", "b": " "} )";
  for (const std::string header : {"<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const OutputDelta out =
          Read("<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant" + header + content, seed);
      EXPECT_EQ(out.reasoning, "Let me see.");
      EXPECT_EQ(out.content, content);
    }
  }
}

TEST(FramedParserTest, AnAnswerThatIsCutOffInReasoningHasNoContent) {
  const OutputDelta out = Read("<|channel|>analysis<|message|>Let me", 3);
  EXPECT_EQ(out.reasoning, "Let me");
  EXPECT_EQ(out.content, "");
}

}  // namespace
}  // namespace spl::router
