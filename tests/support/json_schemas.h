// Whether JSON values are valid by schemas, for the words that the schemas of tests have.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>

namespace spl::testing {

using Json = nlohmann::json;

// `root` has the $defs.
bool IsValid(const Json& value, const Json& schema, const Json& root);

inline bool IsValidObject(const Json& value, const Json& schema, const Json& root) {
  for (const Json& name : schema.value("required", Json::array())) {
    if (!value.contains(name.get<std::string>())) return false;
  }
  const Json properties = schema.value("properties", Json::object());
  for (const auto& [name, member] : value.items()) {
    if (properties.contains(name) ? !IsValid(member, properties[name], root)
                                  : schema.value("additionalProperties", Json(true)) == Json(false))
      return false;
  }
  return true;
}

inline bool IsValidArray(const Json& value, const Json& schema, const Json& root) {
  if (value.size() < schema.value("minItems", 0u) || value.size() > schema.value("maxItems", 1u << 20)) return false;
  return !schema.contains("items") || std::all_of(value.begin(), value.end(), [&](const Json& item) {
    return IsValid(item, schema["items"], root);
  });
}

inline bool IsValidString(const std::string& text, const Json& schema) {
  const auto characters = std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
  if (characters < schema.value("minLength", 0) || characters > schema.value("maxLength", 1 << 30)) return false;
  return !schema.contains("pattern") || std::regex_search(text, std::regex(schema["pattern"].get<std::string>()));
}

inline bool IsOfType(const Json& value, const std::string& type) {
  return type.empty() || (type == "object" && value.is_object()) || (type == "array" && value.is_array()) ||
         (type == "string" && value.is_string()) || (type == "boolean" && value.is_boolean()) ||
         (type == "null" && value.is_null()) || (type == "number" && value.is_number()) ||
         (type == "integer" && value.is_number_integer());
}

inline bool IsValid(const Json& value, const Json& schema, const Json& root) {
  if (schema.contains("$ref"))
    return IsValid(value, root.at(Json::json_pointer(schema["$ref"].get<std::string>().substr(1))), root);
  for (const char* any : {"anyOf", "oneOf"}) {
    if (schema.contains(any) && std::none_of(schema[any].begin(), schema[any].end(),
                                             [&](const Json& one) { return IsValid(value, one, root); }))
      return false;
  }
  if (schema.contains("enum") && std::find(schema["enum"].begin(), schema["enum"].end(), value) == schema["enum"].end())
    return false;
  if (schema.contains("const") && value != schema["const"]) return false;
  if (!IsOfType(value, schema.value("type", ""))) return false;
  if (value.is_number() && (value < schema.value("minimum", -1e300) || value > schema.value("maximum", 1e300)))
    return false;
  if (value.is_string()) return IsValidString(value.get<std::string>(), schema);
  if (value.is_object()) return IsValidObject(value, schema, root);
  return !value.is_array() || IsValidArray(value, schema, root);
}

}  // namespace spl::testing
