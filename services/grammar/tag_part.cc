#include "services/grammar/tag_part.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "services/base/status.h"
#include "services/grammar/grammar_limits.h"
#include "services/grammar/schema_walk.h"

namespace spl::grammar {
namespace {

using Json = nlohmann::ordered_json;

// White space between two parts of the JSON: as much as outside of a structural tag.
constexpr int kMaxJsonSpace = 32;

bool HasType(const Json& schema, const char* name) {
  const Json type = schema.value("type", Json());
  if (type.is_array()) return std::find(type.begin(), type.end(), Json(name)) != type.end();
  return type == name;
}

// Inside of a structural tag a schema leaves nothing open: says what a schema that is not strict leaves open.
void OpenWhatIsNotClosed(Json& schema) {
  if (!schema.is_object()) return;
  ForEachInnerSchema(schema, [](Json& inner) { OpenWhatIsNotClosed(inner); });
  for (const char* alone : {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"}) {
    if (schema.contains(alone)) return;
  }
  const bool typed = schema.contains("type");
  const bool object = typed ? HasType(schema, "object") : schema.contains("properties");
  const bool array = typed ? HasType(schema, "array") : !object && schema.contains("prefixItems");
  if (object && !schema.contains("additionalProperties") && !schema.contains("patternProperties"))
    schema["additionalProperties"] = true;
  if (array && !schema.contains("items")) schema["items"] = true;
}

Json SchemaPart(Json schema, bool strict) {
  if (!strict) OpenWhatIsNotClosed(schema);
  return {{"type", "json_schema"}, {"json_schema", std::move(schema)}, {"max_whitespace_cnt", kMaxJsonSpace}};
}

Json ChoicePart(const Json& choices) {
  Json parts = Json::array();
  for (const Json& choice : choices) parts.push_back({{"type", "const_string"}, {"value", choice}});
  if (parts.size() == 1) return parts[0];
  return {{"type", "or"}, {"elements", std::move(parts)}};
}

}  // namespace

absl::StatusOr<Json> TagPartOf(const GrammarSpec& spec) {
  SPLICE_RETURN_IF_ERROR(CheckGrammarSpec(spec));
  switch (spec.kind) {
    case GrammarKind::kJsonObject:
      return SchemaPart({{"type", "object"}}, false);
    case GrammarKind::kJsonSchema:
      return SchemaPart(Json::parse(spec.text), spec.strict);
    case GrammarKind::kRegex:
      return Json{{"type", "regex"}, {"pattern", spec.text}};
    case GrammarKind::kChoice:
      return ChoicePart(Json::parse(spec.text));
    case GrammarKind::kGrammar:
      return Json{{"type", "grammar"}, {"grammar", spec.text}};
    case GrammarKind::kStructuralTag:
      break;
  }
  return absl::InternalError("a structural tag is no part of one");
}

}  // namespace spl::grammar
