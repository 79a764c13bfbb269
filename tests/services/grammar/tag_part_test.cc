// Forms of answers as parts of a structural tag: the same texts fit.
#include "services/grammar/tag_part.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/services/grammar/vocabularies.h"

namespace spl::grammar {
namespace {

using nlohmann::json;

const GrammarSpec kForms[] = {
    {GrammarKind::kJsonObject, "", false},
    {GrammarKind::kJsonSchema, R"({"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]})", false},
    {GrammarKind::kJsonSchema, R"({"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]})", true},
    {GrammarKind::kJsonSchema, R"({"type":"array","prefixItems":[{"type":"boolean"}]})", false},
    {GrammarKind::kJsonSchema, R"({"type":"array","prefixItems":[{"type":"boolean"}],"minItems":1})", true},
    {GrammarKind::kJsonSchema, R"({"type":["object","array","null"]})", false},
    {GrammarKind::kJsonSchema,
     R"({"$defs":{"p":{"type":"object","properties":{"q":{"type":"null"}}}},"anyOf":[{"$ref":"#/$defs/p"},)"
     R"({"type":"array","items":{"$ref":"#/$defs/p"}}]})",
     false},
    {GrammarKind::kJsonSchema, R"({"properties":{"a":{}},"required":["a"]})", false},
    {GrammarKind::kJsonSchema, R"({"type":"object","propertyNames":{"pattern":"^[a-z]$"}})", false},
    {GrammarKind::kJsonSchema, R"({"type":"object","patternProperties":{"^[a-z]$":{"type":"null"}}})", false},
    {GrammarKind::kJsonSchema, R"({"type":"string","minLength":2,"maxLength":5})", false},
    {GrammarKind::kRegex, "[a-z]{2,5}-(x|yz)*", false},
    {GrammarKind::kChoice, R"(["a", "ab", "b\n\"c\""])", false},
    {GrammarKind::kChoice, R"(["only"])", false},
    {GrammarKind::kGrammar, "root ::= \"(\" root? \")\" | [0-9]+", false},
};

TEST(TagPartTest, TheSameTokensFit) {
  if (!HaveGrammarPlugin()) GTEST_SKIP() << "no libsplice_xgrammar.so: its archive was not fetched";
  std::printf("seed %llu\n", static_cast<unsigned long long>(kSeed));
  std::mt19937_64 random(kSeed);
  for (const GrammarSpec& form : kForms) {
    const auto part = TagPartOf(form);
    ASSERT_TRUE(part.ok()) << part.status();
    const json tag = {{"type", "structural_tag"}, {"format", *part}};
    const auto whole = Tiny().compiler->Compile(form);
    const auto inside = Tiny().compiler->Compile({GrammarKind::kStructuralTag, tag.dump(), false});
    ASSERT_TRUE(whole.ok() && inside.ok()) << form.text << whole.status() << inside.status();
    for (int answer = 0; answer < 20; ++answer) {
      const auto expected = (*whole)->NewMatcher(), got = (*inside)->NewMatcher();
      std::vector<uint32_t> mask(MaskWords(Tiny().vocabulary.width)), same = mask;
      for (int i = 0; i < 60 && !expected->ended(); ++i) {
        ASSERT_TRUE(expected->FillMask(mask).ok());
        ASSERT_TRUE(got->FillMask(same).ok());
        ASSERT_EQ(same, mask) << form.text << " token " << i;
        EXPECT_EQ(got->complete(), expected->complete());
        std::vector<int32_t> allowed;
        for (int32_t id = 0; id < Tiny().vocabulary.width; ++id) {
          if ((mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0) allowed.push_back(id);
        }
        ASSERT_FALSE(allowed.empty());
        const int32_t id = allowed[random() % allowed.size()];
        ASSERT_TRUE(expected->Accept(id).ok());
        ASSERT_TRUE(got->Accept(id).ok());
      }
    }
  }
}

TEST(TagPartTest, WhatIsNotServedIsRefusedAsOutsideOfATag) {
  EXPECT_FALSE(TagPartOf({GrammarKind::kJsonSchema, R"({"not":{}})", false}).ok());
  EXPECT_FALSE(TagPartOf({GrammarKind::kJsonSchema, "{", false}).ok());
  EXPECT_FALSE(TagPartOf({GrammarKind::kChoice, "[]", false}).ok());
  EXPECT_FALSE(TagPartOf({GrammarKind::kRegex, "(a{1000}){1000}", false}).ok());
}

}  // namespace
}  // namespace spl::grammar
