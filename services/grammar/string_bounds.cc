#include "services/grammar/string_bounds.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "services/grammar/schema_walk.h"
#include "services/grammar/string_overlaps.h"

namespace spl::grammar {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxDepth = 64;          // through $refs, as in json_schema_check.cc
constexpr int kMaxLookedAt = 200'000;  // by HasBounds, for all anyOf together

// Takes the bounds out of one schema with all that it contains.
class Schema {
 public:
  Schema(Json root, bool strict) : root_(std::move(root)), places_(root_, strict) {}

  // Whether values that can be read in two ways, of which one has a bound, can be counted.
  bool IsClear() { return Visit(root_); }
  bool overlaps() const { return overlaps_; }  // IsClear has found such values
  // Takes the bounds out; `patterns` come instead.
  void Unbind(bool patterns, int64_t* shortest) { Remove(root_, patterns, shortest); }
  bool has_bounds() const { return has_bounds_; }
  Json Take() { return std::move(root_); }

 private:
  static bool Bounds(const Json& schema) {
    return schema.is_object() && (schema.contains("minLength") || schema.contains("maxLength"));
  }

  static std::string PatternOf(const Json& schema) {
    const auto number = [&](const char* word) {
      const Json bound = schema.value(word, Json());
      return bound.is_number() ? std::to_string(bound.get<int64_t>()) : "";
    };
    const std::string least = number("minLength");
    return R"(^[^"\\\x00-\x1f]{)" + (least.empty() ? "0" : least) + "," + number("maxLength") + "}$";
  }

  bool Visit(const Json& schema) {
    if (!schema.is_object()) return true;
    bool clear = true;
    for (const char* word : {"anyOf", "oneOf"}) {
      if (!clear || !schema.contains(word) || !schema[word].is_array() || AreDisjoint(schema[word])) continue;
      overlaps_ = true;
      clear = places_.CanCount(schema[word]);
    }
    ForEachInnerSchema(schema, [&](const Json& inner) { clear = clear && Visit(inner); });
    return clear;
  }

  bool AreDisjoint(const Json& alternatives) const {
    std::set<std::string> all;
    size_t num = 0;
    for (const Json& alternative : alternatives) {
      const std::set<std::string> types = TypesOf(alternative, 0);
      num += types.size();
      all.insert(types.begin(), types.end());
    }
    if (num == all.size()) return true;
    without_bounds_.clear();
    return std::none_of(alternatives.begin(), alternatives.end(), [&](const Json& one) { return HasBounds(one, 0); });
  }

  // By their first letters, in which JSON types differ.
  std::set<std::string> TypesOf(const Json& schema, int depth) const {
    static const std::set<std::string> every = {"array", "boolean", "null", "number", "object", "string"};
    if (!schema.is_object() || depth > kMaxDepth) return every;
    if (schema.contains("$ref")) {
      const Json* const referred = ReferredSchema(root_, schema);
      return referred == nullptr ? every : TypesOf(*referred, depth + 1);
    }
    if (!schema.contains("type")) return every;
    std::set<std::string> types;
    const Json& type = schema["type"];
    for (const Json& one : type.is_array() ? type : Json::array({type})) {
      const std::string name = one.is_string() ? one.get<std::string>() : "";
      types.insert(name == "integer" ? "number" : name);
    }
    return types;
  }

  // REQUIRES: it has said no since without_bounds_ was cleared. A schema to which many refer is looked at once. True
  // also where there are too many to look at.
  bool HasBounds(const Json& schema, int depth) const {
    if (Bounds(schema) || depth > kMaxDepth || ++num_looked_at_ > kMaxLookedAt) return true;
    if (!schema.is_object() || !without_bounds_.insert(&schema).second) return false;
    if (const Json* const referred = ReferredSchema(root_, schema); referred != nullptr)
      return HasBounds(*referred, depth + 1);
    bool has = false;
    ForEachInnerSchema(schema, [&](const Json& inner) { has = has || HasBounds(inner, depth + 1); });
    return has;
  }

  void Remove(Json& schema, bool patterns, int64_t* shortest) {
    if (!schema.is_object()) return;
    if (Bounds(schema)) {
      has_bounds_ = true;
      if (patterns) schema["pattern"] = PatternOf(schema);
      if (const Json most = schema.value("maxLength", Json()); most.is_number())
        *shortest = std::min(*shortest, most.get<int64_t>());
      schema.erase("minLength");
      schema.erase("maxLength");
    }
    ForEachInnerSchema(schema, [&](Json& inner) { Remove(inner, patterns, shortest); });
  }

  Json root_;
  StringOverlaps places_;  // of root_, before Unbind
  bool has_bounds_ = false;
  bool overlaps_ = false;
  mutable std::set<const Json*> without_bounds_;  // those that HasBounds has looked at
  mutable int num_looked_at_ = 0;
};

// Calls `change` with every schema in a structural tag. False: `change` did not want one.
template <class Change>
bool ChangeSchemas(Json& part, bool strict, const Change& change) {
  if (!part.is_structured()) return true;
  if (part.is_object() && part.contains("json_schema")) {
    Schema schema(std::move(part["json_schema"]), strict);
    if (!change(schema)) return false;
    part["json_schema"] = schema.Take();
    return true;
  }
  return std::all_of(part.begin(), part.end(), [&](Json& inner) { return ChangeSchemas(inner, strict, change); });
}

bool HasSchemas(const GrammarSpec& spec) {
  return spec.kind == GrammarKind::kJsonSchema || spec.kind == GrammarKind::kStructuralTag;
}

// Nothing: `change` did not want a schema.
template <class Change>
std::optional<GrammarSpec> Changed(const GrammarSpec& spec, const Change& change) {
  Json json = Json::parse(spec.text, nullptr, false);
  const bool alone = spec.kind == GrammarKind::kJsonSchema;
  if (alone) json = Json{{"json_schema", std::move(json)}};
  if (!ChangeSchemas(json, spec.strict || !alone, change)) return std::nullopt;
  if (alone) json = Json(std::move(json["json_schema"]));
  GrammarSpec out = spec;
  out.text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  return out;
}

}  // namespace

GrammarSpec WithBoundsAsPatterns(const GrammarSpec& spec) {
  if (!HasSchemas(spec)) return spec;
  bool has_bounds = false;
  std::optional<GrammarSpec> changed = Changed(spec, [&](Schema& schema) {
    int64_t shortest = 0;
    schema.Unbind(true, &shortest);
    has_bounds = has_bounds || schema.has_bounds();
    return true;
  });
  return has_bounds ? *std::move(changed) : spec;
}

std::optional<UnboundedStrings> WithoutStringBounds(const GrammarSpec& spec) {
  if (!HasSchemas(spec)) return std::nullopt;
  UnboundedStrings out{.spec = {}, .shortest = std::numeric_limits<int64_t>::max()};
  bool has_bounds = false;
  std::optional<GrammarSpec> changed = Changed(spec, [&](Schema& schema) {
    if (!schema.IsClear()) return false;
    out.overlaps = out.overlaps || schema.overlaps();
    schema.Unbind(false, &out.shortest);
    has_bounds = has_bounds || schema.has_bounds();
    return true;
  });
  if (!changed.has_value() || !has_bounds) return std::nullopt;
  out.spec = *std::move(changed);
  return out;
}

}  // namespace spl::grammar
