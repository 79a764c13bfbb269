// Grammars of the plug-in over the tokens of splice-tiny: whatever is drawn from the masks fits.
#include "services/grammar/token_grammar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>

#include "services/grammar/grammar_plugin.h"
#include "services/tokenizer/tokenizer.h"

namespace spl::grammar {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr uint64_t kSeed = 20'261'125;

struct Compiler {
  std::unique_ptr<tokenizer::Tokenizer> tokenizer;
  Vocabulary vocabulary;
  std::unique_ptr<GrammarCompiler> compiler;  // null: there is no plug-in
};

const Compiler& Tiny() {
  static const Compiler tiny = [] {
    Compiler made;
    auto loaded = tokenizer::Tokenizer::Load("models/splice-tiny");
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    made.tokenizer = *std::move(loaded);
    made.vocabulary = {made.tokenizer->TokenBytes(),
                       {made.tokenizer->eos_ids().begin(), made.tokenizer->eos_ids().end()},
                       made.tokenizer->vocab_size() + 7};
    auto compiler = MakeGrammarCompiler(made.vocabulary);
    if (compiler.ok()) made.compiler = *std::move(compiler);
    return made;
  }();
  return tiny;
}

class TokenGrammarTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HaveGrammarPlugin()) GTEST_SKIP() << "no libsplice_xgrammar.so: its archive was not fetched";
    ASSERT_NE(Tiny().compiler, nullptr);
    std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  }
  absl::StatusOr<std::shared_ptr<const TokenGrammar>> Compile(GrammarKind kind, const std::string& text,
                                                              bool strict = false) {
    return Tiny().compiler->Compile({kind, text, strict});
  }
  std::vector<int32_t> Allowed(TokenMatcher& matcher) {
    std::vector<uint32_t> mask(MaskWords(Tiny().vocabulary.width));
    matcher.FillMask(mask);
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

// What is within the limits takes seconds at most, sanitizers left aside; deep recursion ends no process.
TEST_F(TokenGrammarTest, HostileTextsAreBounded) {
  json deep = {{"type", "string"}};
  for (int i = 0; i < 30; ++i) deep = {{"type", "object"}, {"properties", {{"a", deep}}}};
  json doubling = {{"$defs", {{"d0", {{"type", "string"}}}}}, {"$ref", "#/$defs/d30"}};
  for (int i = 1; i <= 30; ++i) {
    const json ref = {{"$ref", "#/$defs/d" + std::to_string(i - 1)}};
    doubling["$defs"]["d" + std::to_string(i)] = {{"type", "object"}, {"properties", {{"a", ref}, {"b", ref}}}};
  }
  const std::pair<GrammarKind, std::string> texts[] = {
      {GrammarKind::kJsonSchema, deep.dump()},
      {GrammarKind::kJsonSchema, doubling.dump()},
      {GrammarKind::kJsonSchema, R"({"$ref":"#"})"},
      {GrammarKind::kJsonSchema, R"({"type":"string","maxLength":1000000})"},
      {GrammarKind::kJsonSchema, R"({"type":"array","items":{"type":"integer"},"minItems":1000000})"},
      {GrammarKind::kRegex, "(a{1000}){1000}"},
      {GrammarKind::kRegex, std::string(60, '(') + "a" +
                                [] {
                                  std::string ends;
                                  for (int i = 0; i < 60; ++i) ends += "?)*";
                                  return ends;
                                }()},
      {GrammarKind::kGrammar, "root ::= x{1,1000}\nx ::= y{1,1000}\ny ::= z{1,1000}\nz ::= [a-z]{1,1000}"},
      {GrammarKind::kGrammar, "root ::= root \"a\" | \"a\""},
      {GrammarKind::kGrammar, "root ::= \"a\" | root root root"},
  };
  for (const auto& [kind, text] : texts) {
    const auto start = std::chrono::steady_clock::now();
    const auto grammar = Compile(kind, text);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%6.3f s %s %s\n", seconds, grammar.ok() ? "compiled" : "refused ", text.substr(0, 60).c_str());
    EXPECT_TRUE(grammar.ok() || absl::IsInvalidArgument(grammar.status())) << grammar.status();
    if (grammar.ok()) Draw(**grammar, 50);
  }
}

}  // namespace
}  // namespace spl::grammar
