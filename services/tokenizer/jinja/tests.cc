// The tests: "value is name".
#include <map>

#include "services/base/status.h"
#include "services/tokenizer/jinja/builtins.h"
#include "services/tokenizer/jinja/text.h"

namespace spl::tokenizer::jinja {
namespace {

using TestFn = absl::StatusOr<bool> (*)(const Value&, const Arguments&);
using Kind = Value::Kind;

absl::StatusOr<Value> Operand(const Arguments& arguments) {
  if (arguments.positional.size() != 1 || !arguments.named.empty()) {
    return InvalidArgument("the test takes one argument");
  }
  return arguments.positional[0];
}

template <bool (*test)(int)>
absl::StatusOr<bool> Ordered(const Value& value, const Arguments& arguments) {
  SPLICE_ASSIGN_OR_RETURN(const Value other, Operand(arguments));
  SPLICE_ASSIGN_OR_RETURN(const int order, Compare(value, other));
  return test(order);
}

absl::StatusOr<bool> IsEqual(const Value& value, const Arguments& arguments) {
  SPLICE_ASSIGN_OR_RETURN(const Value other, Operand(arguments));
  return Equal(value, other);
}

absl::StatusOr<bool> IsNotEqual(const Value& value, const Arguments& arguments) {
  SPLICE_ASSIGN_OR_RETURN(const bool equal, IsEqual(value, arguments));
  return !equal;
}

absl::StatusOr<bool> IsIn(const Value& value, const Arguments& arguments) {
  SPLICE_ASSIGN_OR_RETURN(const Value other, Operand(arguments));
  return Contains(other, value);
}

absl::StatusOr<int64_t> Remainder(const Value& value, int64_t divisor) {
  if (!value.is_integer()) return InvalidArgument("the test needs an integer, not {}", value.TypeName());
  if (divisor == 0) return InvalidArgument("modulo by zero");
  return divisor == -1 ? 0 : value.AsInt() % divisor;
}

absl::StatusOr<bool> IsOdd(const Value& value, const Arguments&) {
  SPLICE_ASSIGN_OR_RETURN(const int64_t rest, Remainder(value, 2));
  return rest != 0;
}

absl::StatusOr<bool> IsEven(const Value& value, const Arguments&) {
  SPLICE_ASSIGN_OR_RETURN(const int64_t rest, Remainder(value, 2));
  return rest == 0;
}

absl::StatusOr<bool> IsDivisibleBy(const Value& value, const Arguments& arguments) {
  SPLICE_ASSIGN_OR_RETURN(const Value other, Operand(arguments));
  if (!other.is_integer()) return InvalidArgument("divisibleby needs an integer, not {}", other.TypeName());
  SPLICE_ASSIGN_OR_RETURN(const int64_t rest, Remainder(value, other.AsInt()));
  return rest == 0;
}

template <Case mode>
absl::StatusOr<bool> IsCase(const Value& value, const Arguments&) {
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ToText(value));
  SPLICE_ASSIGN_OR_RETURN(const std::string changed, ChangeCase(text, mode));
  SPLICE_ASSIGN_OR_RETURN(const std::string other,
                          ChangeCase(text, mode == Case::kUpper ? Case::kLower : Case::kUpper));
  return changed == text && other != text;
}

template <Kind kind>
absl::StatusOr<bool> IsKind(const Value& value, const Arguments&) {
  return value.kind() == kind;
}

template <bool expected>
absl::StatusOr<bool> IsBool(const Value& value, const Arguments&) {
  return value.is_bool() && (value.AsInt() != 0) == expected;
}

absl::StatusOr<bool> IsDefined(const Value& value, const Arguments&) { return !value.is_undefined(); }
absl::StatusOr<bool> IsNumber(const Value& value, const Arguments&) { return value.is_number(); }
absl::StatusOr<bool> IsCallable(const Value& value, const Arguments&) {
  return value.kind() == Kind::kCallable || value.kind() == Kind::kMacro;
}
// Undefined values can be iterated and have a length, too.
absl::StatusOr<bool> IsIterable(const Value& value, const Arguments&) {
  return value.is_undefined() || value.is_string() || value.is_sequence() || value.is_dict() ||
         value.kind() == Kind::kLoop;
}
absl::StatusOr<bool> IsSequence(const Value& value, const Arguments&) {
  return value.is_string() || value.is_sequence() || value.is_dict();
}

bool Less(int order) { return order < 0; }
bool LessEqual(int order) { return order <= 0; }
bool Greater(int order) { return order > 0; }
bool GreaterEqual(int order) { return order >= 0; }

const std::map<std::string_view, TestFn>& Tests() {
  static const auto* const tests = new std::map<std::string_view, TestFn>{
      {"defined", IsDefined},
      {"undefined", IsKind<Kind::kUndefined>},
      {"none", IsKind<Kind::kNone>},
      {"string", IsKind<Kind::kString>},
      {"mapping", IsKind<Kind::kDict>},
      {"float", IsKind<Kind::kFloat>},
      {"integer", IsKind<Kind::kInt>},
      {"boolean", IsKind<Kind::kBool>},
      {"true", IsBool<true>},
      {"false", IsBool<false>},
      {"number", IsNumber},
      {"iterable", IsIterable},
      {"sequence", IsSequence},
      {"callable", IsCallable},
      {"odd", IsOdd},
      {"even", IsEven},
      {"divisibleby", IsDivisibleBy},
      {"in", IsIn},
      {"upper", IsCase<Case::kUpper>},
      {"lower", IsCase<Case::kLower>},
      {"eq", IsEqual},
      {"equalto", IsEqual},
      {"==", IsEqual},
      {"ne", IsNotEqual},
      {"!=", IsNotEqual},
      {"lt", Ordered<Less>},
      {"lessthan", Ordered<Less>},
      {"<", Ordered<Less>},
      {"le", Ordered<LessEqual>},
      {"<=", Ordered<LessEqual>},
      {"gt", Ordered<Greater>},
      {"greaterthan", Ordered<Greater>},
      {">", Ordered<Greater>},
      {"ge", Ordered<GreaterEqual>},
      {">=", Ordered<GreaterEqual>},
  };
  return *tests;
}

}  // namespace

bool IsTest(std::string_view name) { return Tests().contains(name); }

absl::StatusOr<bool> ApplyTest(std::string_view name, const Value& input, const Arguments& arguments) {
  const auto it = Tests().find(name);
  if (it == Tests().end()) return InvalidArgument("the test '{}' is not supported", name);
  return it->second(input, arguments);
}

}  // namespace spl::tokenizer::jinja
