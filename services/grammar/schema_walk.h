// Steps from a JSON schema to those that it holds or refers to. REQUIRES, everywhere: json_schema_check.h took the
// root.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

namespace spl::grammar {

// Calls `call` with every schema one level inside `schema`, by whatever word it is there; targets of $refs are not
// followed. `Json`: an nlohmann::json, const or not. REQUIRES: `schema` is an object.
template <class Json, class Call>
void ForEachInnerSchema(Json& schema, const Call& call) {
  for (const char* word : {"additionalProperties", "items", "propertyNames"}) {
    if (schema.contains(word)) call(schema[word]);
  }
  for (const char* word : {"allOf", "anyOf", "oneOf", "prefixItems"}) {
    if (!schema.contains(word) || !schema[word].is_array()) continue;
    for (auto& inner : schema[word]) call(inner);
  }
  for (const char* word : {"$defs", "definitions", "patternProperties", "properties"}) {
    if (!schema.contains(word) || !schema[word].is_object()) continue;
    for (auto& inner : schema[word]) call(inner);
  }
}

// The schema to which `schema` refers, read as json_schema_check.h reads it: a name is one as it is written, and stands
// in an object. Null: it refers to none.
template <class Json>
const Json* ReferredSchema(const Json& root, const Json& schema) {
  if (!schema.is_object() || !schema.contains("$ref") || !schema["$ref"].is_string()) return nullptr;
  const std::string ref = schema["$ref"].template get<std::string>();
  const Json* at = &root;
  for (size_t begin = 2; ref != "#" && begin <= ref.size();) {
    const size_t end = std::min(ref.find('/', begin), ref.size());
    const auto found = at->find(ref.substr(begin, end - begin));
    if (found == at->end()) return nullptr;
    at = &*found;
    begin = end + 1;
  }
  return at;
}

}  // namespace spl::grammar
