#include "services/grammar/string_overlaps.h"

#include <algorithm>

#include "services/grammar/schema_walk.h"

namespace spl::grammar {
namespace {

using Json = StringOverlaps::Json;

constexpr int kMaxDepth = 64;  // through $refs and anyOf
constexpr int kMaxSteps = 20'000;

const Json& Any() {
  static const Json any = true;
  return any;
}

// The strings of a schema: none, any, those of a length, certain ones, those of a pattern or a format.
enum class Strings { kNone, kAny, kBounded, kFixed, kPattern };

bool Has(const Json& schema, const char* word) { return schema.is_object() && schema.contains(word); }

bool IsFixed(const Json& leaf) { return Has(leaf, "const") || Has(leaf, "enum"); }

// The values of an enum or a const.
Json FixedOf(const Json& leaf) {
  if (Has(leaf, "const")) return Json::array({leaf["const"]});
  return Has(leaf, "enum") ? leaf["enum"] : Json::array();
}

// By its type; a schema without a type has that of its words, or any.
bool MayBe(const Json& leaf, const std::string& name) {
  if (Has(leaf, "type")) {
    const Json& type = leaf["type"];
    return type.is_array() ? std::find(type.begin(), type.end(), Json(name)) != type.end() : type == Json(name);
  }
  if (Has(leaf, "properties") || Has(leaf, "additionalProperties")) return name == "object";
  if (Has(leaf, "items") || Has(leaf, "prefixItems")) return name == "array";
  return true;
}

bool IsAny(const Json& leaf) {
  return !Has(leaf, "type") && !IsFixed(leaf) && MayBe(leaf, "object") && MayBe(leaf, "array");
}

Strings StringsOf(const Json& leaf) {
  const Json fixed = FixedOf(leaf);
  if (IsFixed(leaf)) {
    const bool has = std::any_of(fixed.begin(), fixed.end(), [](const Json& value) { return value.is_string(); });
    return has ? Strings::kFixed : Strings::kNone;
  }
  if (!MayBe(leaf, "string")) return Strings::kNone;
  if (Has(leaf, "pattern") || Has(leaf, "format")) return Strings::kPattern;
  return Has(leaf, "minLength") || Has(leaf, "maxLength") ? Strings::kBounded : Strings::kAny;
}

bool StringsCanMeet(const Json& a, const Json& b) {
  const Strings of_a = StringsOf(a), of_b = StringsOf(b);
  if (of_a == Strings::kNone || of_b == Strings::kNone) return true;
  if (of_a == Strings::kPattern && of_b == Strings::kPattern)
    return a.value("pattern", Json()) == b.value("pattern", Json()) &&
           a.value("format", Json()) == b.value("format", Json());
  if (of_a == Strings::kPattern || of_b == Strings::kPattern) return false;
  const bool bounded = of_a == Strings::kBounded || of_b == Strings::kBounded;
  return !bounded || (of_a != Strings::kFixed && of_b != Strings::kFixed);
}

bool HasStructured(const Json& values) {
  return std::any_of(values.begin(), values.end(), [](const Json& value) { return value.is_structured(); });
}

}  // namespace

bool StringOverlaps::CanCount(const Json& alternatives) {
  for (size_t i = 0; i < alternatives.size(); ++i) {
    for (size_t j = i + 1; j < alternatives.size(); ++j) {
      if (!CanMeet(alternatives[i], alternatives[j])) return false;
    }
  }
  return true;
}

bool StringOverlaps::CanMeet(const Json& a, const Json& b) {
  if (++num_steps_ > kMaxSteps) return false;
  if (!seen_.insert({&a, &b}).second) return true;
  Leaves of_a, of_b;
  if (!AddLeaves(a, 0, &of_a) || !AddLeaves(b, 0, &of_b)) return false;
  return std::all_of(of_a.begin(), of_a.end(), [&](const Json* one) {
    return std::all_of(of_b.begin(), of_b.end(), [&](const Json* other) { return LeavesCanMeet(*one, *other); });
  });
}

bool StringOverlaps::AddLeaves(const Json& schema, int depth, Leaves* out) {
  if (depth > kMaxDepth || ++num_steps_ > kMaxSteps) return false;
  if (schema == Json(false)) return true;
  if (Has(schema, "$ref")) {
    const Json* const referred = ReferredSchema(root_, schema);
    return referred != nullptr && AddLeaves(*referred, depth + 1, out);
  }
  for (const char* word : {"anyOf", "oneOf", "allOf"}) {
    if (!Has(schema, word)) continue;
    return std::all_of(schema[word].begin(), schema[word].end(),
                       [&](const Json& inner) { return AddLeaves(inner, depth + 1, out); });
  }
  out->push_back(&schema);
  return true;
}

bool StringOverlaps::LeavesCanMeet(const Json& a, const Json& b) {
  if (++num_steps_ > kMaxSteps || !StringsCanMeet(a, b)) return false;
  // Listed objects and lists have certain strings inside.
  if (HasStructured(FixedOf(a)) || HasStructured(FixedOf(b))) return false;
  return IsFixed(a) || IsFixed(b) || (ObjectsCanMeet(a, b) && ListsCanMeet(a, b));
}

const Json* StringOverlaps::Others(const Json& leaf, const char* word) const {
  if (IsAny(leaf)) return &Any();
  if (Has(leaf, word)) return leaf[word] == Json(false) ? nullptr : &leaf[word];
  return strict_ ? nullptr : &Any();
}

const Json* StringOverlaps::Property(const Json& leaf, const std::string& name) const {
  if (Has(leaf, "properties") && leaf["properties"].contains(name)) return &leaf["properties"][name];
  return Others(leaf, "additionalProperties");
}

// A value is beside those of the same name. Names by a pattern, or with bounds, are not followed.
bool StringOverlaps::ObjectsCanMeet(const Json& a, const Json& b) {
  if (!MayBe(a, "object") || !MayBe(b, "object")) return true;
  for (const Json* const leaf : {&a, &b}) {
    if (Has(*leaf, "patternProperties") || Has(*leaf, "propertyNames")) return false;
  }
  for (const Json* const leaf : {&a, &b}) {
    if (!Has(*leaf, "properties")) continue;
    for (const auto& named : (*leaf)["properties"].items()) {
      if (!BothCanMeet(Property(a, named.key()), Property(b, named.key()))) return false;
    }
  }
  return BothCanMeet(Others(a, "additionalProperties"), Others(b, "additionalProperties"));
}

StringOverlaps::Leaves StringOverlaps::ItemsOf(const Json& leaf) const {
  Leaves items;
  if (Has(leaf, "prefixItems")) {
    for (const Json& item : leaf["prefixItems"]) items.push_back(&item);
  }
  if (const Json* const others = Others(leaf, "items"); others != nullptr) items.push_back(others);
  return items;
}

// Any item of one may be beside any of the other: where in its list it stands is not looked at.
bool StringOverlaps::ListsCanMeet(const Json& a, const Json& b) {
  if (!MayBe(a, "array") || !MayBe(b, "array")) return true;
  const Leaves of_a = ItemsOf(a), of_b = ItemsOf(b);
  return std::all_of(of_a.begin(), of_a.end(), [&](const Json* one) {
    return std::all_of(of_b.begin(), of_b.end(), [&](const Json* other) { return CanMeet(*one, *other); });
  });
}

}  // namespace spl::grammar
