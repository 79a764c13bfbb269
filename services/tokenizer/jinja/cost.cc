#include "services/tokenizer/jinja/cost.h"

#include <algorithm>
#include <bit>

namespace spl::tokenizer::jinja {
namespace {

constexpr int64_t kCopiesPerStep = 16;      // items that are only copied, which costs a reference count
constexpr int64_t kEqualitiesPerStep = 32;  // comparisons of small values

bool IsOneOf(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// a * b without overflow.
int64_t Times(int64_t a, int64_t b) { return std::min(kCostMax, std::min(a, kCostMax) * std::min(b, kCostMax)); }

// Most items that a loop over `value` visits.
int64_t NumItems(const Value& value) {
  if (value.is_string()) return static_cast<int64_t>(value.AsString().size());
  if (value.is_sequence()) return static_cast<int64_t>(value.AsList().size());
  return value.is_dict() ? static_cast<int64_t>(value.AsDict().items.size()) : 0;
}

int64_t TextOnlyCost(const Value& value) { return value.is_string() ? value.cost() : 0; }

}  // namespace

int64_t TextFormCost(const Value& value) { return value.is_string() ? 0 : value.cost(); }

int64_t IterationCost(const Value& value) {
  return value.is_sequence() ? NumItems(value) / kCopiesPerStep : NumItems(value);
}

int64_t ComparisonCost(std::string_view op, const Value& left, const Value& right) {
  if (op != "in" && op != "not in") return std::min(left.cost(), right.cost());
  return right.is_dict() ? TextOnlyCost(left) : right.cost();
}

int64_t ArgumentsCost(const Arguments& arguments) {
  int64_t cost = 0;
  for (const Value& value : arguments.positional) cost = std::min(kCostMax, cost + value.cost());
  for (const auto& argument : arguments.named) cost = std::min(kCostMax, cost + argument.second.cost());
  return cost;
}

int64_t FilterCost(std::string_view name, const Value& input, const Arguments& arguments) {
  if (IsOneOf(name, {"d", "default", "safe", "first", "last", "items"})) return 0;
  if (IsOneOf(name, {"count", "length"})) return TextOnlyCost(input);
  if (IsOneOf(name, {"list", "reverse"})) return IterationCost(input);
  const int64_t walk = input.cost() + ArgumentsCost(arguments);
  if (IsOneOf(name, {"map", "select", "selectattr", "reject", "rejectattr"})) {
    return walk + Times(NumItems(input), 1 + ArgumentsCost(arguments));  // every item uses the arguments
  }
  if (name == "join") return walk + NumItems(input);
  if (IsOneOf(name, {"sort", "dictsort", "min",
                     "max"})) {  // every item is compared as often as their number has binary digits
    return Times(walk + NumItems(input), std::bit_width(static_cast<uint64_t>(NumItems(input))) + 1);
  }
  if (name == "unique") {  // every item is compared with every one before it
    return walk + NumItems(input) + Times(NumItems(input), NumItems(input) + input.cost()) / kEqualitiesPerStep;
  }
  return walk;
}

int64_t TestCost(std::string_view name, const Value& input, const Arguments& arguments) {
  return ArgumentsCost(arguments) + (IsOneOf(name, {"lower", "upper"}) ? 2 * TextOnlyCost(input) : 0);
}

int64_t MethodCost(const Value& object, const Arguments& arguments) {
  return object.is_string() ? object.cost() + ArgumentsCost(arguments) : 0;
}

}  // namespace spl::tokenizer::jinja
