// Grammars of the plug-in over the tokens of splice-tiny: whatever is drawn from the masks fits.
#include "services/grammar/token_grammar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <regex>

#include "services/grammar/grammar_limits.h"
#include "services/grammar/grammar_plugin.h"
#include "tests/services/grammar/vocabularies.h"

namespace spl::grammar {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class TokenGrammarTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HaveGrammarPlugin()) GTEST_SKIP() << "no libsplice_xgrammar.so: its archive was not fetched";
    ASSERT_NE(Tiny().compiler, nullptr);
    std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  }
  absl::StatusOr<std::shared_ptr<const TokenGrammar>> Compile(GrammarKind kind, const std::string& text,
                                                              bool strict = false) {
    const GrammarSpec spec{kind, text, strict};
    if (absl::Status checked = CheckGrammarSpec(spec); !checked.ok()) return checked;  // as GrammarCache does
    return Tiny().compiler->Compile(spec);
  }
  std::vector<int32_t> Allowed(TokenMatcher& matcher) {
    std::vector<uint32_t> mask(MaskWords(Tiny().vocabulary.width));
    EXPECT_TRUE(matcher.FillMask(mask).ok());
    std::vector<int32_t> allowed;
    for (int32_t i = 0; i < Tiny().vocabulary.width; ++i) {
      if (mask[static_cast<size_t>(i) / 32] >> (i % 32) & 1) allowed.push_back(i);
    }
    return allowed;
  }
  // Draws from the masks up to an end token; empty: more than `max` tokens.
  std::optional<std::vector<int32_t>> Draw(const TokenGrammar& grammar, size_t max = 400) {
    const auto matcher = grammar.NewMatcher();
    std::vector<int32_t> tokens;
    while (!matcher->ended()) {
      if (tokens.size() == max) return std::nullopt;
      const std::vector<int32_t> allowed = Allowed(*matcher);
      if (allowed.empty()) {
        ADD_FAILURE() << "nothing is allowed behind " << TextOf(tokens);
        return std::nullopt;
      }
      tokens.push_back(allowed[random_() % allowed.size()]);
      EXPECT_TRUE(matcher->Accept(tokens.back()).ok());
    }
    return tokens;
  }
  // Whether the text is an answer by the grammar, as a whole.
  bool Fits(const TokenGrammar& grammar, const std::string& text) {
    const auto ids = Tiny().tokenizer->Encode(text, {});
    EXPECT_TRUE(ids.ok()) << ids.status();
    const auto matcher = grammar.NewMatcher();
    for (const int32_t id : *ids) {
      if (!matcher->Accept(id).ok()) return false;
    }
    return matcher->complete();
  }
  std::string TextOf(const std::vector<int32_t>& tokens) {
    return Tiny().tokenizer->Decode(tokens, {.skip_special_tokens = true}).value_or("?");
  }
  std::string TextOf(const absl::StatusOr<std::shared_ptr<const TokenGrammar>>& grammar) {
    EXPECT_TRUE(grammar.ok()) << grammar.status();
    const auto tokens = grammar.ok() ? Draw(**grammar) : std::nullopt;
    return tokens.has_value() ? TextOf(*tokens) : "endless";
  }

  std::mt19937_64 random_{kSeed};
};

#ifdef SPLICE_HAVE_XGRAMMAR
// Else the tests below would be skipped, and nobody would know.
TEST(GrammarPluginTest, OpensWhereItWasBuilt) { EXPECT_TRUE(HaveGrammarPlugin()); }
#else
TEST(GrammarPluginTest, SaysHowToGetIt) {
  const auto compiler = MakeGrammarCompiler({{"a", ""}, {1}, 2});
  EXPECT_EQ(compiler.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(compiler.status().message()), HasSubstr("./dev build"));
}
#endif

TEST_F(TokenGrammarTest, TokenBytesAreTheText) {
  const auto& tokenizer = *Tiny().tokenizer;
  for (const char* text : {"{\"a\": [1, 2.5e3]}", "Grüße, 世界! 🚢", " two  spaces\n\ttab"}) {
    const auto ids = tokenizer.Encode(text, {});
    ASSERT_TRUE(ids.ok());
    std::string bytes;
    for (const int32_t id : *ids) bytes += Tiny().vocabulary.tokens[static_cast<size_t>(id)];
    EXPECT_EQ(bytes, text);
  }
  for (const int32_t id : tokenizer.eos_ids()) EXPECT_EQ(Tiny().vocabulary.tokens[static_cast<size_t>(id)], "");
}

TEST_F(TokenGrammarTest, RegexChoiceAndGrammar) {
  const auto regex = Compile(GrammarKind::kRegex, "[a-z]{3}-[0-9]{2,4}( ü)?");
  const auto choice = Compile(GrammarKind::kChoice, R"(["yes", "no", "it's \"q\" \\ \n ü"])");
  const auto grammar =
      Compile(GrammarKind::kGrammar, "root ::= \"(\" num (\"+\" num){0,3} \")\"\nnum ::= [1-9] [0-9]{0,2}");
  for (int i = 0; i < 40; ++i) {
    EXPECT_TRUE(std::regex_match(TextOf(regex), std::regex("[a-z]{3}-[0-9]{2,4}( ü)?")));
    EXPECT_THAT(TextOf(choice), ::testing::AnyOf("yes", "no", "it's \"q\" \\ \n ü"));
    EXPECT_TRUE(std::regex_match(TextOf(grammar), std::regex(R"(\([1-9][0-9]{0,2}(\+[1-9][0-9]{0,2}){0,3}\))")));
  }
}

TEST_F(TokenGrammarTest, SchemasStrictAndNot) {
  const std::string schema = R"({"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"]})";
  int others = 0;
  for (int i = 0; i < 40; ++i) {
    const json strict = json::parse(TextOf(Compile(GrammarKind::kJsonSchema, schema, true)), nullptr, false);
    ASSERT_TRUE(strict.is_object() && strict.at("a").is_boolean()) << strict;
    EXPECT_EQ(strict.size(), 1u);
    const auto loose = Draw(**Compile(GrammarKind::kJsonSchema, schema, false));
    if (!loose.has_value()) continue;
    const json value = json::parse(TextOf(*loose), nullptr, false);
    ASSERT_TRUE(value.is_object() && value.at("a").is_boolean()) << TextOf(*loose);
    others += value.size() > 1;
  }
  EXPECT_GT(others, 0) << "without strict there may be other properties";
}

TEST_F(TokenGrammarTest, AMatcherIsRebuiltFromTokens) {
  const auto grammar = Compile(GrammarKind::kJsonSchema,
                               R"({"type":"array","items":{"enum":["red","green","blue"]},"minItems":3,"maxItems":6})");
  ASSERT_TRUE(grammar.ok()) << grammar.status();
  const auto tokens = Draw(**grammar);
  ASSERT_TRUE(tokens.has_value());
  const auto whole = (*grammar)->NewMatcher();
  for (size_t i = 0; i < tokens->size(); ++i) {
    const auto resumed = (*grammar)->NewMatcher();
    for (size_t k = 0; k < i; ++k) ASSERT_TRUE(resumed->Accept((*tokens)[k]).ok());
    EXPECT_EQ(Allowed(*resumed), Allowed(*whole)) << i;
    EXPECT_FALSE(whole->ended());
    ASSERT_TRUE(whole->Accept((*tokens)[i]).ok());
  }
  EXPECT_TRUE(whole->ended());
  EXPECT_FALSE(whole->Accept(5).ok());
}

TEST_F(TokenGrammarTest, WhatDoesNotFitChangesNothing) {
  const auto grammar = Compile(GrammarKind::kChoice, R"(["yes","no"])");
  ASSERT_TRUE(grammar.ok()) << grammar.status();
  const auto matcher = (*grammar)->NewMatcher();
  const auto before = Allowed(*matcher);
  const int32_t end = Tiny().tokenizer->eos_ids()[0];
  for (const int32_t token : {end, Tiny().vocabulary.width - 1, Tiny().vocabulary.width, -1})
    EXPECT_FALSE(matcher->Accept(token).ok()) << token;
  EXPECT_EQ(Allowed(*matcher), before);
  EXPECT_FALSE(matcher->complete());
}

TEST_F(TokenGrammarTest, SaysWhatIsNotSupported) {
  struct Case {
    GrammarKind kind;
    std::string text, reason;
  };
  const Case cases[] = {
      {GrammarKind::kJsonSchema, "{\"type\": \"objec", "parse"},
      {GrammarKind::kJsonSchema, R"({"type":"foo"})", "foo"},
      {GrammarKind::kJsonSchema, R"({"not":{"type":"string"}})", "not"},
      {GrammarKind::kJsonSchema, R"({"type":"array","uniqueItems":true})", "uniqueItems"},
      {GrammarKind::kJsonSchema, R"({"type":"number","multipleOf":0.1})", "multipleOf"},
      {GrammarKind::kJsonSchema, R"({"type":"integer","minimum":1,"multipleOf":3})", "multipleOf"},
      {GrammarKind::kJsonSchema, R"({"type":"string","pattern":"a+","minLength":2})", "minLength"},
      {GrammarKind::kJsonSchema, R"({"oneOf":[{"type":"integer"},{"type":"number"}]})", "oneOf"},
      {GrammarKind::kJsonSchema, R"({"allOf":[{"type":"integer"},{"minimum":2,"type":"number"}]})", "allOf"},
      {GrammarKind::kJsonSchema, "false", "cannot accept"},
      {GrammarKind::kRegex, "(((", "parenthesis"},
      {GrammarKind::kRegex, "(?=a)b", "Lookahead"},
      {GrammarKind::kGrammar, "root ::= (", "EBNF"},
      {GrammarKind::kGrammar, "root ::= root", "no text fits"},
      {GrammarKind::kStructuralTag, "{}", ""},
  };
  for (const Case& c : cases) {
    const auto grammar = Compile(c.kind, c.text);
    EXPECT_EQ(grammar.status().code(), absl::StatusCode::kInvalidArgument) << c.text;
    EXPECT_THAT(std::string(grammar.status().message()), HasSubstr(c.reason)) << c.text;
  }
}

// Each word that is not refused: values that it allows, and values that it does not.
TEST_F(TokenGrammarTest, EveryWordOfASchemaIsKeptTo) {
  struct Case {
    std::string schema;
    std::vector<std::string> good, bad;
  };
  const Case cases[] = {
      {R"({"type":"boolean"})", {"true", "false"}, {"1", "null", "\"true\""}},
      {R"({"type":"null"})", {"null"}, {"false"}},
      {R"({"type":["string","null"]})", {"\"a\"", "null"}, {"1"}},
      {R"({"type":"integer"})", {"0", "-12", "345"}, {"1.5", "01", "\"1\"", "1e3"}},
      {R"({"type":"number"})", {"0", "-1.5", "2e10", "3.25E-2"}, {"\"1\"", ".5", "01"}},
      {R"({"type":"integer","minimum":-3,"maximum":12})", {"-3", "0", "12"}, {"-4", "13", "100"}},
      {R"({"type":"integer","exclusiveMinimum":5,"exclusiveMaximum":8})", {"6", "7"}, {"5", "8"}},
      {R"({"type":"number","minimum":1.5,"maximum":3})", {"1.5", "2", "2.999", "3"}, {"1.49", "3.01", "-2", "30"}},
      {R"({"type":"number","exclusiveMinimum":0})", {"0.001", "7"}, {"0", "-1", "-0.5"}},
      {R"({"type":"integer","multipleOf":7})", {"0", "7", "-14", "700"}, {"1", "6", "15"}},
      {R"({"type":"string","minLength":2,"maxLength":4})", {"\"ab\"", "\"äöüß\""}, {"\"a\"", "\"abcde\""}},
      {R"({"type":"string","pattern":"^[a-c]{2}$"})", {"\"ab\""}, {"\"abc\"", "\"ad\"", "\"\""}},
      {R"({"type":"string","format":"date"})", {"\"2026-11-25\""}, {"\"2026-13-25\"", "\"today\""}},
      {R"({"type":"string","format":"uuid"})", {"\"123e4567-e89b-12d3-a456-426614174000\""}, {"\"123e4567\"", "\"\""}},
      {R"({"enum":["a",2,null,{"b":[1]}]})", {"\"a\"", "2", "null"}, {"\"b\"", "3", "true"}},
      {R"({"type":"string","enum":["a","b"]})", {"\"a\""}, {"\"c\""}},
      {R"({"const":"x"})", {"\"x\""}, {"\"y\"", "\"xx\""}},
      {R"({"type":"array","items":{"type":"boolean"},"minItems":1,"maxItems":2})",
       {"[true]", "[true, false]"},
       {"[]", "[1]", "[true, true, true]"}},
      {R"({"type":"array","prefixItems":[{"type":"null"}],"items":{"type":"boolean"}})",
       {"[null]", "[null, true]"},
       {"[true]", "[null, null]"}},
      {R"({"type":"array","prefixItems":[{"type":"null"}],"items":false})", {"[null]"}, {"[null, 1]"}},
      {R"({"type":"object","properties":{"a":{"type":"boolean"},"b":{"type":"null"}},"required":["a"],)"
       R"("additionalProperties":false})",
       {R"({"a": true})", R"({"a": true, "b": null})"},
       {"{}", R"({"b": null})", R"({"a": 1})", R"({"a": true, "c": 1})", R"({"a": true, "a": false})"}},
      {R"({"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"]})",
       {R"({"a": true})", R"({"a": true, "c": [1]})"},
       {"{}", R"({"a": 1})", R"({"a": true, "a": 1})"}},
      {R"({"type":"object","additionalProperties":{"type":"boolean"}})", {"{}", R"({"x": true})"}, {R"({"x": 1})"}},
      {R"({"type":"object","patternProperties":{"^x-[a-z]$":{"type":"boolean"}}})",
       {"{}", R"({"x-a": true})"},
       {R"({"x-a": 1})"}},
      {R"({"type":"object","propertyNames":{"enum":["a","b"]}})", {"{}", R"({"a": 1})"}, {R"({"c": 1})"}},
      {R"({"type":"object","propertyNames":{"pattern":"^[ab]$"},"additionalProperties":{"type":"null"}})",
       {R"({"a": null})"},
       {R"({"c": null})", R"({"a": 1})"}},
      {R"({"type":"object","properties":{"a":{"type":"null"},"b":{"type":"null"},"c":{"type":"null"}},)"
       R"("minProperties":1,"maxProperties":2,"additionalProperties":false})",
       {R"({"a": null})", R"({"b": null, "c": null})"},
       {"{}", R"({"a": null, "b": null, "c": null})"}},
      {R"({"anyOf":[{"type":"null"},{"type":"boolean"}]})", {"null", "true"}, {"1"}},
      {R"({"oneOf":[{"type":"null"},{"type":"boolean"}]})", {"null", "true"}, {"1"}},
      {R"({"allOf":[{"type":"null"}]})", {"null"}, {"1"}},
      {R"({"type":"object","anyOf":[{"type":"object","additionalProperties":false}]})", {"{}"}, {"[]", R"({"a": 1})"}},
      {R"({"$defs":{"n":{"type":"null"}},"type":"array","items":{"$ref":"#/$defs/n"}})", {"[null]"}, {"[1]"}},
      {R"({"type":"object","properties":{"next":{"$ref":"#"}},"additionalProperties":false})",
       {"{}", R"({"next": {"next": {}}})"},
       {R"({"next": 1})", R"({"next": {"n": 1}})"}},
  };
  for (const Case& c : cases) {
    const auto grammar = Compile(GrammarKind::kJsonSchema, c.schema);
    ASSERT_TRUE(grammar.ok()) << c.schema << grammar.status();
    for (const std::string& text : c.good) EXPECT_TRUE(Fits(**grammar, text)) << c.schema << "\n" << text;
    for (const std::string& text : c.bad) EXPECT_FALSE(Fits(**grammar, text)) << c.schema << "\n" << text;
  }
}

}  // namespace
}  // namespace spl::grammar
