// Bounds of what a grammar takes of the machine: texts that would take it without end, and what people really ask for.
#include <gtest/gtest.h>

#include <ctime>
#include <nlohmann/json.hpp>

#include "services/grammar/grammar_limits.h"
#include "tests/services/grammar/vocabularies.h"

namespace spl::grammar {
namespace {

using nlohmann::json;

class GrammarBudgetTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!HaveGrammarPlugin()) GTEST_SKIP() << "no libsplice_xgrammar.so: its archive was not fetched";
    ASSERT_NE(Tiny().compiler, nullptr);
    std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  }
};

// Processor time of this thread: what others do on the machine is no part of it.
double ProcessorSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::string Repeated(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

// Texts that would take a compiler, or the masks of an answer, without end.
using Text = std::pair<GrammarKind, std::string>;
std::vector<Text> HostileTexts() {
  json deep = {{"type", "string"}};
  for (int i = 0; i < 24; ++i) deep = {{"type", "object"}, {"properties", {{"a", deep}}}};
  json doubling = {{"$defs", {{"d0", {{"type", "string"}}}}}, {"$ref", "#/$defs/d30"}};
  json chain = {{"$defs", {{"d0", {{"type", "null"}}}}}, {"$ref", "#/$defs/d60"}};
  json any = {{"$defs", {{"d0", {{"type", "null"}}}}}, {"$ref", "#/$defs/d40"}};
  for (int i = 1; i <= 60; ++i) {
    const json ref = {{"$ref", "#/$defs/d" + std::to_string(i - 1)}};
    const std::string name = "d" + std::to_string(i);
    if (i <= 30) doubling["$defs"][name] = {{"type", "object"}, {"properties", {{"a", ref}, {"b", ref}}}};
    if (i <= 40) any["$defs"][name] = {{"anyOf", {ref, ref}}};
    chain["$defs"][name] = {{"type", "array"}, {"items", ref}};
  }
  json wide = {{"type", "object"}};
  for (int i = 0; i < 1000; ++i) wide["properties"]["p" + std::to_string(i)] = {{"type", "string"}};
  std::string rules = "root ::= r0\n";
  for (int i = 0; i < 3000; ++i) rules += "r" + std::to_string(i) + " ::= \"a\" r" + std::to_string(i + 1) + "?\n";
  rules += "r3000 ::= \"b\"\n";
  return {
      {GrammarKind::kJsonSchema, deep.dump()},
      {GrammarKind::kJsonSchema, doubling.dump()},
      {GrammarKind::kJsonSchema, chain.dump()},
      {GrammarKind::kJsonSchema, any.dump()},
      {GrammarKind::kJsonSchema, wide.dump()},
      {GrammarKind::kJsonSchema, R"({"$ref":"#"})"},
      {GrammarKind::kJsonSchema, R"({"type":"string","maxLength":1000000})"},
      {GrammarKind::kJsonSchema, R"({"type":"array","items":{"type":"integer"},"minItems":1000000})"},
      {GrammarKind::kJsonSchema, R"({"type":"string","pattern":"^(a|b|ab|ba)*c(a|b){200}$"})"},
      {GrammarKind::kRegex, "(a{1000}){1000}"},
      {GrammarKind::kRegex, R"((\w|\d|.){1,500}x(\w|\d|.){1,500})"},
      {GrammarKind::kRegex, "(a|b)*a(a|b){18}"},
      {GrammarKind::kRegex, "(.*a){12}"},
      {GrammarKind::kRegex, Repeated("(", 60) + "a" + Repeated("?)*", 60)},
      {GrammarKind::kGrammar, "root ::= x{1,1000}\nx ::= y{1,1000}\ny ::= z{1,1000}\nz ::= [a-z]{1,1000}"},
      {GrammarKind::kGrammar, "root ::= root \"a\" | \"a\""},
      {GrammarKind::kGrammar, "root ::= \"a\" | root root root"},
      {GrammarKind::kGrammar, "root ::= a a a a\na ::= b* b* b*\nb ::= c* c*\nc ::= [a-z]*"},
      {GrammarKind::kGrammar, rules},
  };
}

// Compiles each and draws from its masks. No compile and no mask takes longer than its budget and a little; whatever
// goes beyond is refused, or ends that answer alone.
void ExpectBounded(const GrammarCompiler& compiler, int32_t width, const std::vector<Text>& texts) {
  std::mt19937_64 random(kSeed);
  for (const auto& [kind, text] : texts) {
    const double start = ProcessorSeconds();
    const absl::Status checked = CheckGrammarSpec({kind, text, false});  // as GrammarCache does
    const auto grammar = checked.ok() ? compiler.Compile({kind, text, false})
                                      : absl::StatusOr<std::shared_ptr<const TokenGrammar>>(checked);
    const double seconds = ProcessorSeconds() - start;
    EXPECT_LT(seconds, 11) << text.substr(0, 60);
    EXPECT_TRUE(grammar.ok() || absl::IsInvalidArgument(grammar.status())) << grammar.status();
    double slowest = 0;
    int drawn = 0;
    std::string end;
    if (grammar.ok()) {
      const auto matcher = (*grammar)->NewMatcher();
      std::vector<uint32_t> mask(MaskWords(width));
      for (; drawn < 100 && !matcher->ended() && end.empty(); ++drawn) {
        const double before = ProcessorSeconds();
        absl::Status step = matcher->FillMask(mask);
        std::vector<int32_t> allowed;
        for (int32_t i = 0; i < width && step.ok(); ++i) {
          if (mask[static_cast<size_t>(i) / 32] >> (i % 32) & 1) allowed.push_back(i);
        }
        if (step.ok() && allowed.empty()) step = absl::NotFoundError("nothing fits");
        if (step.ok()) step = matcher->Accept(allowed[random() % allowed.size()]);
        slowest = std::max(slowest, ProcessorSeconds() - before);
        if (!step.ok()) end = step.ToString();
      }
    }
    std::printf("%7.3f s, %3d tokens, slowest %6.2f ms  %.60s\n  %s\n", seconds, drawn, slowest * 1e3, text.c_str(),
                (grammar.ok() ? end : grammar.status().ToString()).substr(0, 150).c_str());
    EXPECT_LT(slowest, 0.2) << text.substr(0, 60);
  }
}

TEST_F(GrammarBudgetTest, HostileTextsAreBounded) {
  ExpectBounded(*Tiny().compiler, Tiny().vocabulary.width, HostileTexts());
}

TEST_F(GrammarBudgetTest, HostileTextsAreBoundedForManyTokens) {
  const Vocabulary vocabulary = BigVocabulary();
  const auto compiler = MakeGrammarCompiler(vocabulary);
  ASSERT_TRUE(compiler.ok()) << compiler.status();
  ExpectBounded(**compiler, vocabulary.width,
                {{GrammarKind::kJsonSchema, R"({"type":"string","maxLength":1000000})"},
                 {GrammarKind::kRegex, R"((\w|\d|.){1,50}x(\w|\d|.){1,50})"},
                 {GrammarKind::kRegex, Repeated("(", 60) + "a" + Repeated("?)*", 60)},
                 {GrammarKind::kGrammar, "root ::= a a a a\na ::= b* b* b*\nb ::= c* c*\nc ::= [a-z]*"}});
}

// Nothing of what people ask for comes near the budgets.
TEST_F(GrammarBudgetTest, OrdinarySchemasAreWithinTheBudgets) {
  json wide = {{"type", "object"}, {"additionalProperties", false}};
  for (int i = 0; i < 60; ++i) {
    wide["properties"]["name" + std::to_string(i)] = {{"type", i % 3 == 0 ? "integer" : "string"}};
    wide["required"].push_back("name" + std::to_string(i));
  }
  const std::string schemas[] = {
      R"({"type":"object","properties":{"title":{"type":"string","maxLength":12},"tags":{"type":"array","items":)"
      R"({"type":"string"},"maxItems":8},"score":{"type":"number","minimum":0,"maximum":1}},)"
      R"("required":["title","tags","score"],"additionalProperties":false})",
      R"({"type":"object","properties":{"a":{"type":"string","minLength":1,"maxLength":80},)"
      R"("b":{"type":"string","maxLength":2},"c":{"type":"array","items":{"type":"string","maxLength":2000}}},)"
      R"("required":["a","b"],"additionalProperties":false})",
      R"({"anyOf":[{"type":"object","properties":{"name":{"type":"string","maxLength":400},"kind":{"const":"cat"}},)"
      R"("required":["name","kind"],"additionalProperties":false},{"type":"object","properties":{"name":{"type":)"
      R"("string","maxLength":20},"tags":{"type":"array","items":{"type":"string","maxLength":8}}},)"
      R"("required":["name","tags"],"additionalProperties":false}]})",
      R"({"type":"structural_tag","format":{"type":"sequence","elements":[{"type":"grammar","grammar":"root ::= [^<]*"},)"
      R"({"type":"const_string","value":"<"},{"type":"json_schema","json_schema":{"anyOf":[{"type":"string",)"
      R"("maxLength":9},{"type":"string","minLength":12,"maxLength":20}]}}]}})",
      R"({"type":"object"})",
      wide.dump(),
      R"({"type":"string","format":"date-time"})",
      R"({"type":"string","format":"email"})",
  };
  std::mt19937_64 random(kSeed);
  const Vocabulary vocabulary = BigVocabulary();
  const auto big = MakeGrammarCompiler(vocabulary);
  ASSERT_TRUE(big.ok()) << big.status();
  for (const std::string& schema : schemas) {
    for (const bool many : {false, true}) {
      const int32_t width = many ? vocabulary.width : Tiny().vocabulary.width;
      const double start = ProcessorSeconds();
      const bool is_tag = schema.starts_with(R"({"type":"structural_tag")");
      const GrammarSpec spec{is_tag ? GrammarKind::kStructuralTag : GrammarKind::kJsonSchema, schema, false};
      const auto grammar = (many ? **big : *Tiny().compiler).Compile(spec);
      const double compiled = ProcessorSeconds() - start;
      ASSERT_TRUE(grammar.ok()) << schema << grammar.status();
      double slowest = 0, all = 0;
      int drawn = 0;
      std::vector<uint32_t> mask(MaskWords(width));
      for (int answer = 0; answer < 10; ++answer) {
        const auto matcher = (*grammar)->NewMatcher();
        for (int i = 0; i < 150 && !matcher->ended(); ++i, ++drawn) {
          const double before = ProcessorSeconds();
          ASSERT_TRUE(matcher->FillMask(mask).ok()) << schema;
          const double took = ProcessorSeconds() - before;
          slowest = std::max(slowest, took);
          all += took;
          std::vector<int32_t> allowed;
          for (int32_t id = 0; id < width; ++id) {
            if (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) allowed.push_back(id);
          }
          ASSERT_FALSE(allowed.empty());
          ASSERT_TRUE(matcher->Accept(allowed[random() % allowed.size()]).ok());
        }
      }
      std::printf("%6d tokens: compiled in %6.1f ms, masks %7.1f us in the mean of %d, slowest %6.2f ms  %.50s\n",
                  width, compiled * 1e3, all / drawn * 1e6, drawn, slowest * 1e3, schema.c_str());
    }
  }
}

}  // namespace
}  // namespace spl::grammar
