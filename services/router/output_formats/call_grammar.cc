#include "services/router/output_formats/call_grammar.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "services/base/status.h"

namespace spl::router {
namespace {

constexpr int kMaxArgumentSpace = 2;  // white space between two parts of JSON
// Words that speak of all arguments together.
constexpr const char* kTogether[] = {
    "$ref",
    "allOf",
    "anyOf",
    "const",
    "enum",
    "maxProperties",
    "minProperties",
    "not",
    "oneOf",
    "if",
    "propertyNames",
    "patternProperties",
    "dependencies",
    "unevaluatedProperties",
    "dependentRequired",
    "dependentSchemas",
};

bool IsLiteral(const GrammarPart& part) { return part["type"] == "const_string"; }

// The begin or end of a tag: a text, or a token as a part.
GrammarPart Edge(GrammarPart part) { return IsLiteral(part) ? GrammarPart(std::move(part["value"])) : part; }

// Whether every $ref inside refers to a definition. Sets `any` if there is one.
bool RefersToDefinitions(const GrammarPart& schema, bool* any) {
  if (!schema.is_structured()) return true;
  if (schema.is_object() && schema.contains("$ref")) {
    *any = true;
    const std::string ref = schema["$ref"].is_string() ? schema["$ref"].get<std::string>() : "";
    if (!ref.starts_with("#/$defs/") && !ref.starts_with("#/definitions/")) return false;
  }
  return std::all_of(schema.begin(), schema.end(),
                     [&](const GrammarPart& inner) { return RefersToDefinitions(inner, any); });
}

absl::Status Refuse(const ForcedTool& tool, std::string_view why) {
  return InvalidArgument("the tool \"{}\" cannot be forced of a model that writes arguments one by one: {}", tool.name,
                         why);
}

// A schema by itself, with the definitions of all parameters if it refers to some.
absl::StatusOr<GrammarPart> Complete(const ForcedTool& tool, const std::string& name, GrammarPart schema) {
  bool refers = false;
  bool inside = RefersToDefinitions(schema, &refers);
  if (!refers) return schema;
  for (const char* word : {"$defs", "definitions"}) {
    if (!tool.parameters.contains(word)) continue;
    inside = inside && RefersToDefinitions(tool.parameters[word], &refers);
    schema[word] = tool.parameters[word];
  }
  if (!inside)
    return Refuse(tool, "a $ref of its parameter \"" + name + "\" refers to something else than a definition in $defs");
  return schema;
}

// The texts without some tags, as rules of a grammar: one for each beginning of a tag that was just written.
class TextRules {
 public:
  explicit TextRules(const std::vector<std::string_view>& tags) {
    for (const std::string_view tag : tags) {
      for (size_t i = 1; i < tag.size(); ++i) next_[std::string(tag.substr(0, i))][tag[i]] = i + 1 == tag.size();
    }
  }

  std::string Write() const {
    std::string rules = "root ::= [^<]* (\"\" | \"<\" " + NameOf("<") + ")\n";
    for (const auto& [begun, letters] : next_) {
      std::string rule = NameOf(begun) + " ::= \"\" | \"<\" " + NameOf("<"), others = "<";
      for (const auto& [letter, ends] : letters) {
        others += letter;
        if (!ends) rule += fmt::format(" | \"{}\" {}", letter, NameOf(begun + letter));
      }
      rules += fmt::format("{} | [^{}] root\n", rule, others);
    }
    return rules;
  }

 private:
  std::string NameOf(const std::string& begun) const {
    return "behind_" + std::to_string(std::distance(next_.begin(), next_.find(begun)));
  }

  // By the beginning of a tag: letters that go on with one, and whether they end it.
  std::map<std::string, std::map<char, bool>> next_;
};

}  // namespace

GrammarPart LiteralPart(std::string_view text) { return {{"type", "const_string"}, {"value", text}}; }

GrammarPart TagPart(const ForcedTools& tools, std::string_view tag) {
  const std::optional<int32_t> id = tools.special == nullptr ? std::nullopt : tools.special(tag);
  return id.has_value() ? GrammarPart{{"type", "token"}, {"token", *id}} : LiteralPart(tag);
}

GrammarPart SequencePart(std::vector<GrammarPart> parts) {
  std::vector<GrammarPart> merged;
  for (GrammarPart& part : parts) {
    if (!merged.empty() && IsLiteral(merged.back()) && IsLiteral(part)) {
      merged.back()["value"] = merged.back()["value"].get<std::string>() + part["value"].get<std::string>();
    } else {
      merged.push_back(std::move(part));
    }
  }
  if (merged.size() == 1) return std::move(merged.front());
  return {{"type", "sequence"}, {"elements", std::move(merged)}};
}

GrammarPart AnyOfPart(std::vector<GrammarPart> parts) {
  if (parts.size() == 1) return std::move(parts.front());
  return {{"type", "or"}, {"elements", std::move(parts)}};
}

GrammarPart OptionalPart(GrammarPart part) { return {{"type", "optional"}, {"content", std::move(part)}}; }

GrammarPart RepeatedPart(GrammarPart part, bool one) {
  return one ? std::move(part) : GrammarPart{{"type", "plus"}, {"content", std::move(part)}};
}

GrammarPart JsonPart(GrammarPart schema) {
  return {{"type", "json_schema"}, {"json_schema", std::move(schema)}, {"max_whitespace_cnt", kMaxArgumentSpace}};
}

GrammarPart TextWithoutPart(const std::vector<std::string_view>& tags) {
  return {{"type", "grammar"}, {"grammar", TextRules(tags).Write()}};
}

GrammarPart SeparatedPart(std::vector<CallFrame> calls, std::string_view separator, bool one) {
  GrammarPart tags = GrammarPart::array();
  for (CallFrame& call : calls) {
    tags.push_back({{"type", "tag"},
                    {"begin", Edge(std::move(call.begin))},
                    {"content", std::move(call.content)},
                    {"end", Edge(std::move(call.end))}});
  }
  return {{"type", "tags_with_separator"},
          {"tags", std::move(tags)},
          {"separator", separator},
          {"at_least_one", true},
          {"stop_after_first", one}};
}

absl::StatusOr<std::vector<ForcedArgument>> ForcedArguments(const ForcedTool& tool, bool (*is_name)(std::string_view)) {
  const GrammarPart& parameters = tool.parameters;
  if (!parameters.is_object() || parameters.value("type", GrammarPart()) != "object")
    return Refuse(tool, "its parameters must be a schema of \"type\": \"object\"");
  for (const char* word : kTogether) {
    if (parameters.contains(word)) return Refuse(tool, std::string("its parameters have \"") + word + '"');
  }
  const GrammarPart properties = parameters.value("properties", GrammarPart::object());
  const GrammarPart required = parameters.value("required", GrammarPart::array());
  if (!properties.is_object() || !required.is_array()) return Refuse(tool, "its parameters are no schema");
  for (const GrammarPart& name : required) {
    if (!name.is_string() || !properties.contains(name.get<std::string>()))
      return Refuse(tool, "\"required\" names " + name.dump() + ", which is no property");
  }
  std::vector<ForcedArgument> arguments;
  for (const auto& [name, schema] : properties.items()) {
    if (!is_name(name)) return Refuse(tool, "the name of its parameter \"" + name + "\" has no place in the format");
    SPLICE_ASSIGN_OR_RETURN(GrammarPart complete, Complete(tool, name, schema));
    const bool is_required = std::find(required.begin(), required.end(), GrammarPart(name)) != required.end();
    arguments.push_back({name, std::move(complete), is_required});
  }
  return arguments;
}

}  // namespace spl::router
