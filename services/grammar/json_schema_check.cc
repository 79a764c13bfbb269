#include "services/grammar/json_schema_check.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>

#include "services/base/status.h"

namespace spl::grammar {
namespace {

using Json = nlohmann::json;
using Types = std::set<std::string>;

constexpr int kMaxDepth = 64;            // through $refs
constexpr int kMaxTypeLookups = 10'000;  // schemas may share parts in a way that makes the ways through them many

// Words that the compiler (xgrammar 0.2.8) ignores, or takes for something else.
constexpr std::string_view kNotKept[] = {
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "contains",
    "minContains",
    "maxContains",
    "$dynamicRef",
    "$recursiveRef",
    "unevaluatedProperties",
    "dependencies",
    "additionalItems",
    "unevaluatedItems",
};
// The first of these that a schema has is kept to, and nothing beside it.
constexpr std::string_view kAlone[] = {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"};
// Words that say something about values of one type, with that type.
constexpr std::pair<std::string_view, std::string_view> kOfType[] = {
    {"properties", "object"},        {"required", "object"},      {"additionalProperties", "object"},
    {"patternProperties", "object"}, {"propertyNames", "object"}, {"minProperties", "object"},
    {"maxProperties", "object"},     {"items", "array"},          {"prefixItems", "array"},
    {"minItems", "array"},           {"maxItems", "array"},       {"minLength", "string"},
    {"maxLength", "string"},         {"pattern", "string"},       {"format", "string"},
    {"minimum", "number"},           {"maximum", "number"},       {"exclusiveMinimum", "number"},
    {"exclusiveMaximum", "number"},  {"multipleOf", "number"},
};
// Formats that JSON Schema defines and the compiler does not know. Others are notes for people.
constexpr std::string_view kFormatsNotKept[] = {"idn-email", "idn-hostname", "iri", "iri-reference", "regex"};

// Whether the compiler keeps other properties from having the name, too: it compares bytes without escapes.
bool IsPlainName(const std::string& name) {
  return std::all_of(name.begin(), name.end(), [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; });
}

std::string TypeOf(const Json& value) {
  if (value.is_number_integer()) return "integer";
  if (value.is_number_float()) return value.get<double>() == std::floor(value.get<double>()) ? "integer" : "number";
  return value.is_null() ? "null" : value.type_name();
}

// Null, which is empty, where there is none.
const Json& Member(const Json& schema, std::string_view word) {
  static const Json none;
  const auto found = schema.find(word);
  return found == schema.end() ? none : *found;
}

// Whether a value of type `one` is one of `types`, too.
bool Has(const Types& types, const std::string& one) {
  return types.contains(one) || (one == "integer" && types.contains("number"));
}

Types TypesIn(const Json& type) {
  Types types;
  if (type.is_string()) types.insert(type.get<std::string>());
  for (const Json& one : type.is_array() ? type : Json::array()) {
    if (one.is_string()) types.insert(one.get<std::string>());
  }
  return types;
}

std::string Inside(const std::string& place, const char* word) { return place.empty() ? word : place + "." + word; }

class Walk {
 public:
  Walk(const Json& root, bool strict) : root_(root), strict_(strict) {}

  // `is_name`: of names of properties, which are strings without a type saying so.
  absl::Status Visit(const Json& schema, const std::string& place, int depth, bool is_name = false) {
    if (schema.is_boolean()) return absl::OkStatus();
    if (!schema.is_object()) return Refuse(place, "must be a schema, which is an object, true or false");
    if (++num_schemas_ > kMaxSchemas)
      return InvalidArgument("has more than {} schemas inside, the most that are served", kMaxSchemas);
    if (depth > kMaxDepth)
      return Refuse(place, fmt::format("is nested more than {} deep, the deepest that is served", kMaxDepth));
    SPLICE_RETURN_IF_ERROR(CheckWords(schema, place, depth));
    SPLICE_RETURN_IF_ERROR(CheckBesides(schema, place, is_name));
    SPLICE_RETURN_IF_ERROR(CheckObject(schema, place));
    return VisitInner(schema, place, depth);
  }

 private:
  static absl::Status Refuse(const std::string& place, const std::string& why) {
    return absl::InvalidArgumentError(place.empty() ? why : "at " + place + " " + why);
  }

  static absl::Status CheckWords(const Json& schema, const std::string& place, int depth) {
    for (const std::string_view word : kNotKept) {
      if (schema.contains(word)) return Refuse(place, fmt::format("has \"{}\", which is not supported", word));
    }
    if (schema.value("uniqueItems", Json()) == Json(true))
      return Refuse(place, "has \"uniqueItems\": true, which is not supported");
    if (depth > 0 && schema.contains("$id") && schema["$id"].is_string())
      return Refuse(place, "has an \"$id\" inside of the schema, which is not supported");
    if (const auto format = schema.find("format"); format != schema.end() && format->is_string() &&
                                                   std::find(std::begin(kFormatsNotKept), std::end(kFormatsNotKept),
                                                             format->get<std::string>()) != std::end(kFormatsNotKept))
      return Refuse(place,
                    fmt::format("has the \"format\" \"{}\", which is not supported", format->get<std::string>()));
    if (const auto values = schema.find("enum"); values != schema.end() && values->size() > kMaxEnumValues)
      return Refuse(place,
                    fmt::format("has an \"enum\" of {} values, at most {} are served", values->size(), kMaxEnumValues));
    return absl::OkStatus();
  }

  // Words beside those that stand alone, and words without the type that they are about.
  absl::Status CheckBesides(const Json& schema, const std::string& place, bool is_name) {
    const auto* const alone = std::find_if(std::begin(kAlone), std::end(kAlone),
                                           [&](std::string_view word) { return schema.contains(word); });
    if (alone != std::end(kAlone)) {
      for (const auto* other = alone + 1; other != std::end(kAlone); ++other) {
        if (schema.contains(*other)) return RefuseBeside(place, *other, *alone);
      }
      for (const auto& [word, type] : kOfType) {
        if (schema.contains(word)) return RefuseBeside(place, word, *alone);
      }
      if (!schema.contains("type")) return absl::OkStatus();
      const Types given = TypesIn(schema["type"]), kept = TypesOfAlone(schema, 0);
      if (!kept.empty() && std::all_of(kept.begin(), kept.end(), [&](const auto& one) { return Has(given, one); }))
        return absl::OkStatus();
      return Refuse(
          place, fmt::format("has a \"type\" that excludes something of its \"{}\", which is not supported", *alone));
    }
    if (schema.contains("type") || is_name) return absl::OkStatus();
    const bool object = schema.contains("properties") || schema.contains("additionalProperties");
    const bool array = !object && (schema.contains("items") || schema.contains("prefixItems"));
    for (const auto& [word, type] : kOfType) {
      if (schema.contains(word) && !object && !array)
        return Refuse(place, fmt::format("has \"{}\" and no \"type\": add \"type\": \"{}\"", word, type));
    }
    return absl::OkStatus();
  }

  static absl::Status RefuseBeside(const std::string& place, std::string_view word, std::string_view alone) {
    return Refuse(place, fmt::format("has \"{}\" beside \"{}\", which is not supported: move it into the schemas of "
                                     "\"{}\"",
                                     word, alone, alone));
  }

  // Combinations of words about properties that the compiler does not keep to.
  absl::Status CheckObject(const Json& schema, const std::string& place) {
    const auto has = [&](const char* word) { return schema.contains(word); };
    const Json& properties = Member(schema, "properties");
    if (properties.size() > kMaxProperties)
      return Refuse(place,
                    fmt::format("has {} \"properties\", at most {} are served", properties.size(), kMaxProperties));
    const Json& required = Member(schema, "required");
    for (const Json& name : required) {
      if (!name.is_string() || !properties.contains(name.get<std::string>()))
        return Refuse(place, "requires " + name.dump() + ", which is none of its \"properties\"");
    }
    const bool patterns = has("patternProperties"), names = has("propertyNames");
    if (patterns && names) return RefuseTogether(place, "patternProperties", "propertyNames");
    for (const char* const keys : {"patternProperties", "propertyNames"}) {
      if (has(keys) && !properties.empty()) return RefuseTogether(place, keys, "properties");
    }
    if (patterns && schema["patternProperties"].size() > 1)
      return Refuse(place, "has several \"patternProperties\", of which one is supported");
    if (patterns && schema.value("additionalProperties", Json(false)) != Json(false))
      return RefuseTogether(place, "patternProperties", "additionalProperties");
    if (names && schema.value("additionalProperties", Json(true)) == Json(false))
      return RefuseTogether(place, "propertyNames", "additionalProperties\": false, \"");
    const bool open = patterns || names || schema.value("additionalProperties", Json(!strict_)) != Json(false);
    for (const auto& [name, inner] : properties.items()) {
      if (open && !IsPlainName(name))
        return Refuse(place,
                      "may have other properties beside \"" + name +
                          "\", which is supported only for names of plain letters: add \"additionalProperties\": "
                          "false");
    }
    // A name that comes twice counts once.
    const Json least = schema.value("minProperties", Json(0));
    if (open && least.is_number() && least.get<double>() > static_cast<double>(std::max<size_t>(required.size(), 1)))
      return Refuse(place,
                    "has \"minProperties\" above the number of \"required\" ones, which is supported only with "
                    "\"additionalProperties\": false");
    return absl::OkStatus();
  }

  static absl::Status RefuseTogether(const std::string& place, const char* one, const char* other) {
    return Refuse(place, fmt::format("has \"{}\" together with \"{}\", which is not supported", one, other));
  }

  absl::Status VisitInner(const Json& schema, const std::string& place, int depth) {
    if (schema.contains("propertyNames"))
      SPLICE_RETURN_IF_ERROR(Visit(schema["propertyNames"], Inside(place, "propertyNames"), depth + 1, true));
    for (const char* const word : {"items", "additionalProperties"}) {
      if (schema.contains(word)) SPLICE_RETURN_IF_ERROR(Visit(schema[word], Inside(place, word), depth + 1));
    }
    for (const char* const word : {"properties", "patternProperties"}) {
      for (const auto& [name, inner] : Member(schema, word).items())
        SPLICE_RETURN_IF_ERROR(Visit(inner, Inside(place, word) + "." + name, depth + 1));
    }
    for (const char* const word : {"prefixItems", "anyOf", "oneOf", "allOf"}) {
      int index = 0;
      for (const Json& inner : Member(schema, word))
        SPLICE_RETURN_IF_ERROR(Visit(inner, fmt::format("{}[{}]", Inside(place, word), index++), depth + 1));
    }
    if (!schema.contains("$ref")) return absl::OkStatus();
    const Json* target = nullptr;
    SPLICE_RETURN_IF_ERROR(Resolve(schema["$ref"], place, &target));
    const auto uri = schema["$ref"].get<std::string>();
    return uri == "#" || !visited_.insert(uri).second ? absl::OkStatus() : Visit(*target, uri, depth + 1);
  }

  absl::Status Resolve(const Json& ref, const std::string& place, const Json** target) const {
    if (!ref.is_string()) return Refuse(place, "has a \"$ref\" that is no string");
    const auto uri = ref.get<std::string>();
    if (uri != "#" && !uri.starts_with("#/"))
      return Refuse(place, "has the \"$ref\" \"" + uri + "\": only those inside of the schema (#/...) are supported");
    *target = &root_;
    for (size_t begin = 2; uri != "#" && begin <= uri.size();) {
      const size_t end = std::min(uri.find('/', begin), uri.size());
      const std::string key = uri.substr(begin, end - begin);
      if (!(*target)->is_object() || !(*target)->contains(key))
        return Refuse(place, "has the \"$ref\" \"" + uri + "\", and there is no such place");
      *target = &(*target)->at(key);
      begin = end + 1;
    }
    return absl::OkStatus();
  }

  // The types that values of a schema may have; empty: any.
  Types TypesOf(const Json& schema, int depth) {
    if (!schema.is_object() || depth > kMaxDepth || ++num_type_lookups_ > kMaxTypeLookups) return {};
    if (const Types alone = TypesOfAlone(schema, depth); !alone.empty()) return alone;
    if (schema.contains("type")) return TypesIn(schema["type"]);
    if (schema.contains("properties") || schema.contains("additionalProperties")) return {"object"};
    if (schema.contains("items") || schema.contains("prefixItems")) return {"array"};
    return {};
  }

  // Those that its word out of kAlone leaves.
  Types TypesOfAlone(const Json& schema, int depth) {
    if (schema.contains("$ref")) {
      const Json* target = nullptr;
      return Resolve(schema["$ref"], "", &target).ok() ? TypesOf(*target, depth + 1) : Types();
    }
    Types types;
    if (schema.contains("const")) return {TypeOf(schema["const"])};
    if (schema.contains("enum")) {
      for (const Json& value : schema["enum"]) types.insert(TypeOf(value));
      return types;
    }
    for (const char* const word : {"anyOf", "oneOf", "allOf"}) {
      if (!schema.contains(word)) continue;
      for (const Json& inner : schema[word]) {
        const Types of_inner = TypesOf(inner, depth + 1);
        if (of_inner.empty()) return {};
        types.insert(of_inner.begin(), of_inner.end());
      }
      return types;
    }
    return {};
  }

  const Json& root_;
  const bool strict_;
  int num_schemas_ = 0;
  int num_type_lookups_ = 0;
  std::set<std::string> visited_;  // targets of $refs
};

}  // namespace

absl::Status CheckJsonSchema(const Json& root, bool strict) { return Walk(root, strict).Visit(root, "", 0); }

}  // namespace spl::grammar
