// Parts of a JSON schema that are refused before any compiler sees it, and the names that they are refused by.
#include "services/grammar/json_schema_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "services/base/status.h"
#include "services/grammar/grammar_limits.h"

namespace spl::grammar {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

std::string Refusal(const std::string& schema) { return MessageOf(CheckJsonSchema(json::parse(schema), false)); }

TEST(JsonSchemaCheckTest, RefusesByNameWhatIsNotKeptTo) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"not":{}})", "\"not\""},
      {R"({"if":{},"then":{}})", "\"if\""},
      {R"({"type":"object","then":{}})", "\"then\""},
      {R"({"type":"object","else":{}})", "\"else\""},
      {R"({"type":"object","dependentRequired":{"a":["b"]}})", "\"dependentRequired\""},
      {R"({"type":"object","dependentSchemas":{}})", "\"dependentSchemas\""},
      {R"({"type":"object","dependencies":{}})", "\"dependencies\""},
      {R"({"type":"object","unevaluatedProperties":false})", "\"unevaluatedProperties\""},
      {R"({"type":"array","unevaluatedItems":false})", "\"unevaluatedItems\""},
      {R"({"type":"array","additionalItems":false})", "\"additionalItems\""},
      {R"({"type":"array","contains":{}})", "\"contains\""},
      {R"({"type":"array","minContains":1})", "\"minContains\""},
      {R"({"type":"array","maxContains":1})", "\"maxContains\""},
      {R"({"type":"array","uniqueItems":true})", "\"uniqueItems\""},
      {R"({"$dynamicRef":"#a"})", "\"$dynamicRef\""},
      {R"({"type":"array","items":{"$id":"x","type":"null"}})", "\"$id\""},
      {R"({"type":"string","format":"regex"})", "\"format\" \"regex\""},
      {R"({"minimum":3})", "\"minimum\" and no \"type\": add \"type\": \"number\""},
      {R"({"required":["a"]})", "\"required\""},
      {R"({"type":"object","required":["a"]})", "requires \"a\""},
      {R"({"type":"object","properties":{"b":{}},"required":["b","a"]})", "requires \"a\""},
      {R"({"anyOf":[{"type":"null"}],"properties":{}})", "\"properties\" beside \"anyOf\""},
      {R"({"$ref":"#/$defs/a","$defs":{"a":{}},"minLength":3})", "\"minLength\" beside \"$ref\""},
      {R"({"enum":["a"],"anyOf":[{}]})", "\"anyOf\" beside \"enum\""},
      {R"({"type":"string","enum":["a",1]})", "\"type\""},
      {R"({"type":"string","const":null})", "\"type\""},
      {R"({"type":"object","anyOf":[{"type":"object"},{"type":"array"}]})", "\"type\""},
      {R"({"type":"object","anyOf":[{}]})", "\"type\""},
      {R"({"type":"object","patternProperties":{"a":{}},"properties":{"b":{}}})", "\"patternProperties\""},
      {R"({"type":"object","patternProperties":{"a":{},"b":{}}})", "several"},
      {R"({"type":"object","patternProperties":{"a":{}},"additionalProperties":{"type":"null"}})",
       "\"additionalProperties\""},
      {R"({"type":"object","propertyNames":{"enum":["a"]},"additionalProperties":false})", "\"propertyNames\""},
      {R"({"type":"object","propertyNames":{"enum":["a"]},"properties":{"a":{}}})", "\"propertyNames\""},
      {R"({"type":"object","minProperties":2})", "\"minProperties\""},
      {R"({"$ref":"http://x/y"})", "\"$ref\""},
      {R"({"$ref":"#/$defs/none"})", "no such place"},
      {R"({"properties":{"a":{"items":{"not":{}}}}})", "at properties.a.items has \"not\""},
      {R"({"anyOf":[{"type":"null"},{"not":{}}]})", "at anyOf[1] has \"not\""},
      {R"({"$ref":"#/$defs/a","$defs":{"a":{"not":{}}}})", "at #/$defs/a has \"not\""},
      {R"({"type":"object","properties":{"ü":{"type":"null"}}})", "beside \"ü\""},
      {R"({"type":"object","properties":{"a\"b":{}},"additionalProperties":true})", "names of plain letters"},
      {"3", "must be a schema"},
      {R"({"items":[{}]})", "must be a schema"},
  };
  for (const auto& [schema, name] : cases) EXPECT_THAT(Refusal(schema), HasSubstr(name)) << schema;
}

TEST(JsonSchemaCheckTest, AcceptsTheRest) {
  const char* const schemas[] = {
      "true",
      "{}",
      R"({"$id":"https://example.com/a","$schema":"x","title":"t","description":"d","default":1,"examples":[1]})",
      R"({"type":"object","properties":{"not":{"type":"null"},"if":{},"$id":{}},"required":["not"]})",
      R"({"$defs":{"unused":{"not":{}}},"type":"null"})",
      R"({"type":["string","null"],"minLength":2,"maxLength":4})",
      R"({"type":"string","enum":["a","b"],"description":"d"})",
      R"({"type":["integer","null"],"enum":[1,null]})",
      R"({"type":"number","const":2})",
      R"({"type":"object","oneOf":[{"$ref":"#/$defs/a"}],"$defs":{"a":{"properties":{}}}})",
      R"({"type":"string","format":"password"})",
      R"({"type":"array","uniqueItems":false})",
      R"({"type":"object","properties":{"next":{"$ref":"#"}}})",
      R"({"type":"object","additionalProperties":{"type":"null"},"minProperties":1})",
  };
  for (const char* const schema : schemas) EXPECT_EQ(Refusal(schema), "") << schema;
}

// The compiler tells other properties from named ones by their bytes, without escapes.
TEST(JsonSchemaCheckTest, StrictObjectsMayHaveAnyNames) {
  const json schema = json::parse(R"({"type":"object","properties":{"ü":{"type":"null"}}})");
  EXPECT_FALSE(CheckJsonSchema(schema, false).ok());
  EXPECT_TRUE(CheckJsonSchema(schema, true).ok());
  json closed = schema;
  closed["additionalProperties"] = false;
  EXPECT_TRUE(CheckJsonSchema(closed, false).ok());
}

TEST(JsonSchemaCheckTest, SizesAreBounded) {
  json many = {{"type", "object"}};
  for (int i = 0; i <= kMaxProperties; ++i) many["properties"]["p" + std::to_string(i)] = json::object();
  EXPECT_THAT(MessageOf(CheckJsonSchema(many, false)), HasSubstr("1025 \"properties\", at most 1024"));
  json values = {{"enum", json::array()}};
  for (int i = 0; i <= kMaxEnumValues; ++i) values["enum"].push_back(i);
  EXPECT_THAT(MessageOf(CheckJsonSchema(values, false)), HasSubstr("at most 4096"));
  json schemas = {{"anyOf", json::array()}};
  for (int i = 0; i <= kMaxSchemas; ++i) schemas["anyOf"].push_back(json::object());
  EXPECT_THAT(MessageOf(CheckJsonSchema(schemas, false)), HasSubstr("4096 schemas"));
}

// 2^60 ways lead through these 60 definitions, and each is walked once.
TEST(JsonSchemaCheckTest, SharedPartsAreWalkedOnce) {
  json schema = {{"$defs", {{"d0", {{"type", "null"}}}}}, {"$ref", "#/$defs/d60"}};
  for (int i = 1; i <= 60; ++i) {
    const json ref = {{"$ref", "#/$defs/d" + std::to_string(i - 1)}};
    schema["$defs"]["d" + std::to_string(i)] = {{"type", "null"}, {"anyOf", {ref, ref}}};
  }
  EXPECT_EQ(CheckJsonSchema(schema, false).code(), absl::StatusCode::kInvalidArgument)
      << "too many ways to tell its types";
  json deep = {{"$defs", {{"d0", {{"type", "null"}}}}}, {"$ref", "#/$defs/d70"}};
  for (int i = 1; i <= 70; ++i)
    deep["$defs"]["d" + std::to_string(i)] = {{"type", "array"},
                                              {"items", {{"$ref", "#/$defs/d" + std::to_string(i - 1)}}}};
  EXPECT_THAT(MessageOf(CheckJsonSchema(deep, false)), HasSubstr("nested more than 64 deep"));
}

TEST(GrammarLimitsTest, RepetitionsAreWrittenOut) {
  const auto check = [](GrammarKind kind, const std::string& text) {
    return MessageOf(CheckGrammarSpec({kind, text, false}));
  };
  for (const char* text :
       {"a{1000}", "[a-z]{3}-[0-9]{2,4}( x)?", "a{b}", "\\{1000000000\\}", "(a{10}b{20}){30,40}", "[({]{9}"})
    EXPECT_EQ(check(GrammarKind::kRegex, text), "") << text;
  EXPECT_THAT(check(GrammarKind::kRegex, "(a{1000}){1000}"), HasSubstr("is 1000000 long"));
  EXPECT_THAT(check(GrammarKind::kRegex, "(ab{99}){501}"), HasSubstr("is 50100 long"));
  EXPECT_THAT(check(GrammarKind::kRegex, "a{99999999999999999999}"), HasSubstr("repeat less"));
  EXPECT_THAT(check(GrammarKind::kGrammar, "root ::= (\"x{9}\" y){1,50000}"), HasSubstr("repeat less"));
  EXPECT_EQ(check(GrammarKind::kGrammar, "root ::= \"x{99999}\" [{9}]{3}"), "");
}

TEST(GrammarLimitsTest, SchemasInTagsAreCheckedToo) {
  const std::string tag = R"({"type":"structural_tag","format":{"type":"tag","begin":"<","end":">",)"
                          R"("content":{"type":"json_schema","json_schema":{"not":{}}}}})";
  EXPECT_THAT(MessageOf(CheckGrammarSpec({GrammarKind::kStructuralTag, tag, false})), HasSubstr("\"not\""));
}

}  // namespace
}  // namespace spl::grammar
