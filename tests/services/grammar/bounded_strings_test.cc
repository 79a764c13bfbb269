// Strings of bounded length: counted beside a grammar without the bounds.
#include <gtest/gtest.h>

#include <ctime>
#include <nlohmann/json.hpp>

#include "services/grammar/grammar_limits.h"
#include "services/grammar/string_bounds.h"
#include "services/grammar/string_runs.h"
#include "tests/services/grammar/vocabularies.h"
#include "tests/support/json_schemas.h"

namespace spl::grammar {
namespace {

using nlohmann::json;

bool Allows(const std::vector<uint32_t>& mask, int32_t id) {
  return (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
}

std::vector<int32_t> AllowedBy(const std::vector<uint32_t>& mask, int32_t width) {
  std::vector<int32_t> allowed;
  for (int32_t id = 0; id < width; ++id) {
    if (Allows(mask, id)) allowed.push_back(id);
  }
  return allowed;
}

struct Big {
  Vocabulary vocabulary = BigVocabulary();
  std::unique_ptr<GrammarCompiler> compiler;
};

const Big& Many() {
  static const Big big = [] {
    Big made;
    auto compiler = MakeGrammarCompiler(made.vocabulary);
    EXPECT_TRUE(compiler.ok()) << compiler.status();
    made.compiler = *std::move(compiler);
    return made;
  }();
  return big;
}

class BoundedStringsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HaveGrammarPlugin()) GTEST_SKIP() << "no libsplice_xgrammar.so: its archive was not fetched";
    ASSERT_NE(Tiny().compiler, nullptr);
    std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  }
};

const char* const kBounded[] = {
    R"({"type":"string","maxLength":1})",
    R"({"type":"string","minLength":3,"maxLength":3})",
    R"({"type":"string","minLength":20})",
    R"({"type":"object","properties":{"a":{"type":"string","maxLength":2},"b":{"type":"string","minLength":1,"maxLength":40},)"
    R"("c":{"type":"string"}},"required":["a","b","c"],"additionalProperties":false})",
    R"({"type":"array","items":{"type":"string","minLength":1,"maxLength":2},"minItems":3,"maxItems":6})",
    R"({"type":"object","properties":{"a":{"anyOf":[{"type":"string","maxLength":6},{"type":"null"}]},)"
    R"("b":{"enum":["a very long choice of a list","b"]},"c":{"type":"string","pattern":"^[a-z]{4,9}$"}},)"
    R"("required":["a","b","c"],"additionalProperties":false})",
    // Two ways to read a string, one of them by a pattern: no counting beside, the same answers.
    R"({"anyOf":[{"type":"string","maxLength":4},{"type":"string","pattern":"^[0-9]{6}$"}]})",
    R"({"$defs":{"n":{"type":"string","maxLength":5}},"type":"object","properties":{"x":{"$ref":"#/$defs/n"}},)"
    R"("required":["x"],"additionalProperties":false})",
};

// Several schemas may read a text, and each of them is counted.
const char* const kOverlapping[] = {
    R"({"anyOf":[{"type":"string","maxLength":4},{"type":"string","minLength":7,"maxLength":12}]})",
    R"({"anyOf":[{"type":"string","maxLength":4},{"type":"string"},{"type":"integer","minimum":0,"maximum":999}]})",
    R"({"anyOf":[{"type":"object","properties":{"name":{"type":"string","maxLength":5},"kind":{"const":"cat"}},)"
    R"("required":["name","kind"],"additionalProperties":false},{"type":"object","properties":{"name":{"type":"string",)"
    R"("maxLength":9},"lives":{"type":"integer","minimum":1,"maximum":9}},"required":["name","lives"],)"
    R"("additionalProperties":false}]})",
    R"({"anyOf":[{"type":"object","properties":{"a":{"type":"string","maxLength":3},"b":{"type":"boolean"}},)"
    R"("required":["a","b"],"additionalProperties":false},{"type":"object","properties":{"a":{"type":"string"},)"
    R"("b":{"enum":["x","yy","zebra"]}},"required":["a","b"],"additionalProperties":false}]})",
    R"({"anyOf":[{"type":"object","properties":{"a":{"type":"string","maxLength":3},"k":{"type":"string"}},)"
    R"("required":["a","k"],"additionalProperties":false},{"type":"object","properties":{"a":{"type":"string",)"
    R"("maxLength":6},"k":{"enum":["one","twenty-two"]}},"required":["a","k"],"additionalProperties":false}]})",
    R"({"type":"array","items":{"anyOf":[{"type":"string","maxLength":2},{"type":"string","minLength":4,"maxLength":6}]},)"
    R"("minItems":2,"maxItems":4})",
    R"({"anyOf":[{"type":"array","items":{"type":"string","maxLength":2},"minItems":2,"maxItems":3},{"type":"array",)"
    R"("items":{"type":"string","maxLength":5},"minItems":1,"maxItems":2}]})",
    R"({"$defs":{"n":{"type":"string","maxLength":3}},"anyOf":[{"$ref":"#/$defs/n"},{"type":"string","maxLength":6}]})",
    R"({"anyOf":[{"type":"object","properties":{"a":{"type":"string","maxLength":2}},"required":["a"]},)"
    R"({"type":"object","properties":{"a":{"type":"string","maxLength":6}},"required":["a"],)"
    R"("additionalProperties":false}]})",
};

// Draws an answer, all tokens that may come being as likely, and returns it; empty: it has not ended.
std::string Draw(const TokenGrammar& grammar, const Vocabulary& vocabulary, std::mt19937_64& random) {
  const auto matcher = grammar.NewMatcher();
  std::vector<uint32_t> mask(MaskWords(vocabulary.width));
  std::string text;
  const auto quote = static_cast<int32_t>(std::find(vocabulary.tokens.begin(), vocabulary.tokens.end(), "\"") -
                                          vocabulary.tokens.begin());
  for (int i = 0; i < 400; ++i) {
    const absl::Status filled = matcher->FillMask(mask);
    EXPECT_TRUE(filled.ok()) << filled << text;
    const std::vector<int32_t> allowed = AllowedBy(mask, vocabulary.width);
    EXPECT_FALSE(allowed.empty()) << "nothing fits behind " << text;
    if (!filled.ok() || allowed.empty()) return text;
    int32_t id = allowed[random() % allowed.size()];
    // Texts without bounds end by and by.
    if (i > 60 && Allows(mask, quote)) id = quote;
    const absl::Status accepted = matcher->Accept(id);
    EXPECT_TRUE(accepted.ok()) << accepted << " behind " << text;
    if (!accepted.ok() || matcher->ended()) return text;
    text += vocabulary.tokens[static_cast<size_t>(id)];
  }
  return "";
}

void ExpectValidAnswers(const GrammarCompiler& compiler, const Vocabulary& vocabulary, int num_answers) {
  std::mt19937_64 random(kSeed);
  std::vector<const char*> schemas(std::begin(kBounded), std::end(kBounded));
  schemas.insert(schemas.end(), std::begin(kOverlapping), std::end(kOverlapping));
  for (const char* text : schemas) {
    const auto grammar = compiler.Compile({GrammarKind::kJsonSchema, text, false});
    ASSERT_TRUE(grammar.ok()) << text << grammar.status();
    const json schema = json::parse(text);
    int ended = 0;
    for (int i = 0; i < num_answers; ++i) {
      const std::string answer = Draw(**grammar, vocabulary, random);
      if (answer.empty()) continue;
      ++ended;
      const json value = json::parse(answer, nullptr, false);
      ASSERT_FALSE(value.is_discarded()) << text << "\n" << answer;
      ASSERT_TRUE(testing::IsValid(value, schema, schema)) << text << "\n" << answer;
    }
    EXPECT_GT(ended, num_answers / 2) << text;
  }
}

TEST_F(BoundedStringsTest, EveryAnswerIsValid) { ExpectValidAnswers(*Tiny().compiler, Tiny().vocabulary, 60); }

TEST_F(BoundedStringsTest, EveryAnswerIsValidWithManyTokens) {
  ExpectValidAnswers(*Many().compiler, Many().vocabulary, 12);
}

// A grammar with a state for each character of each string, as one that is counted beside it.
TEST_F(BoundedStringsTest, OverlappingSchemasAreCountedAsAPatternCounts) {
  const Vocabulary& vocabulary = Tiny().vocabulary;
  std::mt19937_64 random(kSeed);
  for (const char* text : kOverlapping) {
    const GrammarSpec spec{GrammarKind::kJsonSchema, text, false};
    const auto unbounded = WithoutStringBounds(spec);
    ASSERT_TRUE(unbounded.has_value() && unbounded->overlaps) << text;
    const auto counted = Tiny().compiler->Compile(spec);
    const auto pattern = Tiny().compiler->Compile(WithBoundsAsPatterns(spec));
    ASSERT_TRUE(counted.ok() && pattern.ok()) << text << counted.status() << pattern.status();
    int most_at_once = 0;
    for (int answer = 0; answer < 40; ++answer) {
      const auto ours = (*counted)->NewMatcher(), theirs = (*pattern)->NewMatcher();
      std::vector<uint32_t> mask(MaskWords(vocabulary.width)), expected = mask;
      std::string written;
      OpenCharacter open;
      for (int i = 0; i < 80 && !ours->ended(); ++i) {
        ASSERT_TRUE(ours->FillMask(mask).ok());
        ASSERT_TRUE(theirs->FillMask(expected).ok());
        const std::vector<int32_t> allowed = AllowedBy(mask, vocabulary.width),
                                   all = AllowedBy(expected, vocabulary.width);
        ASSERT_FALSE(allowed.empty()) << text << " behind " << written;
        // Inside of a character a pattern also has bytes that are no UTF-8.
        if (open.bytes().empty()) {
          ASSERT_EQ(allowed, all) << text << " behind " << written;
        } else {
          ASSERT_TRUE(std::includes(all.begin(), all.end(), allowed.begin(), allowed.end())) << text << written;
        }
        EXPECT_EQ(ours->complete(), theirs->complete());
        most_at_once = std::max<int>(most_at_once, static_cast<int>(allowed.size()));
        // Single bytes more often than their number has it: they come near a bound slowly.
        int32_t id = allowed[random() % allowed.size()];
        for (int j = 0; j < 6 && vocabulary.tokens[static_cast<size_t>(id)].size() > 1; ++j)
          id = allowed[random() % allowed.size()];
        ASSERT_TRUE(ours->Accept(id).ok());
        ASSERT_TRUE(theirs->Accept(id).ok());
        if (ours->ended()) break;
        written += vocabulary.tokens[static_cast<size_t>(id)];
        open.Add(vocabulary.tokens[static_cast<size_t>(id)]);
      }
    }
    EXPECT_GT(most_at_once, 1000) << "no answer was in a string: " << text;
  }
}

// Behind some characters exactly the tokens may come that leave the string within its bounds.
TEST_F(BoundedStringsTest, AMaskHasEveryTokenThatFitsAndNoOther) {
  const Vocabulary& vocabulary = Many().vocabulary;
  const auto grammar =
      Many().compiler->Compile({GrammarKind::kJsonSchema, R"({"type":"string","minLength":2,"maxLength":7})", false});
  ASSERT_TRUE(grammar.ok()) << grammar.status();
  std::vector<uint32_t> mask(MaskWords(vocabulary.width));
  for (const std::string written : {"", "a", "ab", "a\xc3\xa4z", "abcdef", "abcdefg", "abcdef\xc3", "\xe2\x82"}) {
    const auto matcher = (*grammar)->NewMatcher();
    ASSERT_TRUE(matcher->Accept('"').ok());
    for (const char c : written) ASSERT_TRUE(matcher->Accept(static_cast<unsigned char>(c)).ok());
    ASSERT_TRUE(matcher->FillMask(mask).ok());
    size_t allowed = 0, expected = 0;
    for (size_t id = 0; id < vocabulary.tokens.size(); ++id) {
      // Without quotes and backslashes, which only end the string, and whole characters behind whole ones.
      const std::string whole = written + vocabulary.tokens[id];
      const bool is_end = vocabulary.tokens[id] == "\"";
      if (vocabulary.tokens[id].empty() || (!is_end && whole.find_first_of("\"\\") != std::string::npos)) continue;
      if (json::parse('"' + (is_end ? written : whole) + '"', nullptr, false).is_discarded()) continue;
      const auto length = std::count_if(whole.begin(), whole.end(), [](char c) { return (c & 0xC0) != 0x80; });
      const bool fits = is_end ? length - 1 >= 2 : length <= 7;
      EXPECT_EQ(Allows(mask, static_cast<int32_t>(id)), fits) << written << " + " << vocabulary.tokens[id];
      allowed += Allows(mask, static_cast<int32_t>(id));
      expected += fits;
    }
    EXPECT_EQ(allowed, expected);
  }
}

TEST_F(BoundedStringsTest, CompilingTakesTheTimeOfAStringWithoutBounds) {
  const auto seconds = [](const char* schema) {
    timespec before = {}, after = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before);
    EXPECT_TRUE(Many().compiler->Compile({GrammarKind::kJsonSchema, schema, false}).ok());
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &after);
    return static_cast<double>(after.tv_sec - before.tv_sec) +
           1e-9 * static_cast<double>(after.tv_nsec - before.tv_nsec);
  };
  seconds(R"({"type":"string","maxLength":3})");  // makes what a vocabulary needs once
  const double without = seconds(R"({"type":"string"})"), with = seconds(R"({"type":"string","maxLength":5000})");
  std::printf("%.1f ms without a bound, %.1f ms with 5000\n", without * 1e3, with * 1e3);
  EXPECT_LT(with, without + 0.5);
  const double both = seconds(R"({"anyOf":[{"type":"string","maxLength":500},{"type":"string","minLength":600}]})");
  std::printf("%.1f ms with 500 beside another string\n", both * 1e3);
  EXPECT_LT(both, without + 0.5);
}

// A pattern never makes a string that is no JSON.
TEST_F(BoundedStringsTest, PatternsHaveNothingThatJsonEscapes) {
  std::mt19937_64 random(kSeed);
  for (const char* pattern : {R"(^a.{3}$)", R"(^\W{2}[^a]$)", R"(^ü[äö"]{2}.$)", R"(^[^x]{2}€?$)"}) {
    const std::string schema = json{{"type", "string"}, {"pattern", pattern}}.dump();
    const auto grammar = Tiny().compiler->Compile({GrammarKind::kJsonSchema, schema, false});
    ASSERT_TRUE(grammar.ok()) << pattern << grammar.status();
    for (int i = 0; i < 40; ++i) {
      const std::string answer = Draw(**grammar, Tiny().vocabulary, random);
      EXPECT_TRUE(json::accept(answer)) << pattern << " " << answer;
    }
  }
  for (const char* pattern : {R"(^a"b$)", R"(^\\$)", R"(^\n$)"}) {
    const std::string schema = json{{"type", "string"}, {"pattern", pattern}}.dump();
    const auto grammar = Tiny().compiler->Compile({GrammarKind::kJsonSchema, schema, false});
    EXPECT_EQ(grammar.status().code(), absl::StatusCode::kInvalidArgument) << pattern;
    EXPECT_NE(grammar.status().message().find("pattern"), std::string::npos) << grammar.status();
  }
}

TEST(StringBoundsTest, AreTakenOutOfEverySchema) {
  const auto unbounded = WithoutStringBounds(
      {GrammarKind::kJsonSchema,
       R"({"type":"object","properties":{"maxLength":{"type":"string","maxLength":9,"minLength":1},)"
       R"("b":{"type":"array","items":{"type":"string","maxLength":4}}}})",
       true});
  ASSERT_TRUE(unbounded.has_value());
  EXPECT_EQ(
      unbounded->spec.text,
      R"({"type":"object","properties":{"maxLength":{"type":"string"},"b":{"type":"array","items":{"type":"string"}}}})");
  EXPECT_EQ(unbounded->shortest, 4);
  EXPECT_TRUE(unbounded->spec.strict);
  const auto tag = WithoutStringBounds(
      {GrammarKind::kStructuralTag,
       R"({"format":{"elements":[{"type":"json_schema","json_schema":{"type":"string","minLength":2}}]}})", false});
  ASSERT_TRUE(tag.has_value());
  EXPECT_EQ(tag->spec.text, R"({"format":{"elements":[{"type":"json_schema","json_schema":{"type":"string"}}]}})");
}

TEST(StringBoundsTest, StayWhereAStringCouldBeReadInTwoWays) {
  const auto has = [](const char* schema) {
    return WithoutStringBounds({GrammarKind::kJsonSchema, schema, false}).has_value();
  };
  EXPECT_EQ(WithBoundsAsPatterns({GrammarKind::kJsonSchema, R"({"type":"string","minLength":2})", false}).text,
            R"({"type":"string","pattern":"^[^\"\\\\\\x00-\\x1f]{2,}$"})");
  EXPECT_FALSE(has(R"({"type":"string"})"));
  EXPECT_TRUE(has(R"({"anyOf":[{"type":"string","maxLength":4},{"type":"null"}]})"));
  EXPECT_TRUE(has(R"({"anyOf":[{"type":"string","maxLength":4},{"type":"string"}]})"));
  EXPECT_FALSE(has(R"({"anyOf":[{"type":"string","maxLength":4},{"type":"string","pattern":"a"}]})"));
  EXPECT_FALSE(has(R"({"anyOf":[{"type":"string","maxLength":4},{"enum":["abcdefgh"]}]})"));
  EXPECT_FALSE(has(
      R"({"anyOf":[{"type":"object","properties":{"a":{"type":"string","maxLength":4}}},{"const":{"a":"abcdefgh"}}]})"));
  EXPECT_TRUE(
      has(R"({"$defs":{"s":{"type":"string","maxLength":4}},"oneOf":[{"$ref":"#/$defs/s"},{"$ref":"#/$defs/s"}]})"));
  EXPECT_TRUE(
      has(R"({"oneOf":[{"type":"object","properties":{"a":{"type":"string","maxLength":4}}},{"type":"object"}]})"));
  // A pattern beside any property: closed objects have none that they do not name.
  const char* const objects = R"({"anyOf":[{"type":"object","properties":{"a":{"type":"string","maxLength":4}}},)"
                              R"({"type":"object","properties":{"b":{"type":"string","pattern":"^[a-z]*$"}}}]})";
  EXPECT_FALSE(has(objects));
  EXPECT_TRUE(WithoutStringBounds({GrammarKind::kJsonSchema, objects, true}).has_value());
  EXPECT_TRUE(
      has(R"({"oneOf":[{"type":"object","properties":{"a":{"type":"string","maxLength":4}}},{"type":"array"}]})"));
}

// Names are no JSON pointers, in which ~ has a meaning.
TEST(StringBoundsTest, ReferencesAreReadAsTheCheckReadsThem) {
  const GrammarSpec spec = {
      GrammarKind::kJsonSchema,
      R"({"$defs":{"a~b":{"type":"string","maxLength":4}},"anyOf":[{"$ref":"#/$defs/a~b"},{"enum":["abcdefgh"]}]})",
      false};
  EXPECT_TRUE(CheckGrammarSpec(spec).ok()) << CheckGrammarSpec(spec);
  EXPECT_FALSE(WithoutStringBounds(spec).has_value());
}

// Each of 30 definitions refers to the next one twice: 2^30 ways to the last one.
TEST(StringBoundsTest, DefinitionsWithManyReferencesAreReadOnce) {
  constexpr int kDefinitions = 30;
  const auto refer = [](int i) { return json{{"$ref", "#/$defs/d" + std::to_string(i)}}; };
  json schema = {
      {"$defs", {{"d30", {{"type", "integer"}}}}},
      {"type", "object"},
      {"properties",
       {{"a", {{"anyOf", {refer(0), {{"type", "object"}}}}}}, {"b", {{"type", "string"}, {"maxLength", 3}}}}}};
  for (int i = 0; i < kDefinitions; ++i)
    schema["$defs"]["d" + std::to_string(i)] = {{"type", "object"},
                                                {"properties", {{"l", refer(i + 1)}, {"r", refer(i + 1)}}}};
  const GrammarSpec spec = {GrammarKind::kJsonSchema, schema.dump(), false};
  EXPECT_TRUE(CheckGrammarSpec(spec).ok()) << CheckGrammarSpec(spec);
  EXPECT_TRUE(WithoutStringBounds(spec).has_value());
  schema["$defs"]["d30"] = {{"type", "string"}, {"maxLength", 3}};
  const auto deep = WithoutStringBounds({GrammarKind::kJsonSchema, schema.dump(), false});
  ASSERT_TRUE(deep.has_value());
  EXPECT_TRUE(deep->overlaps);
}

}  // namespace
}  // namespace spl::grammar
