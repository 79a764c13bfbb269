#include "services/tokenizer/jinja/operators.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "services/base/status.h"
#include "services/text/utf8.h"
#include "services/tokenizer/jinja/limits.h"
#include "services/tokenizer/jinja/text.h"

namespace spl::tokenizer::jinja {
namespace {

using ValueOr = absl::StatusOr<Value>;

absl::Status TooLarge(std::string_view op) { return InvalidArgument("the result of {} is too large", op); }

// Python rounds quotients down and gives remainders the sign of the divisor.
int64_t FloorDivide(int64_t a, int64_t b) { return a / b - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0); }
int64_t FloorRemainder(int64_t a, int64_t b) {
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

ValueOr IntPower(int64_t base, int64_t exponent) {
  if (exponent < 0) return Value::Float(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
  int64_t result = 1;
  for (int64_t i = 0; i < exponent && result != 0; ++i) {
    if (__builtin_mul_overflow(result, base, &result)) return TooLarge("**");
    if ((base == 1) || (base == -1 && i >= 1)) return Value::Int(base == 1 || exponent % 2 == 0 ? 1 : -1);
  }
  return Value::Int(result);
}

ValueOr CalculateInt(std::string_view op, int64_t a, int64_t b) {
  int64_t result = 0;
  if (op == "+") return __builtin_add_overflow(a, b, &result) ? ValueOr(TooLarge(op)) : Value::Int(result);
  if (op == "-") return __builtin_sub_overflow(a, b, &result) ? ValueOr(TooLarge(op)) : Value::Int(result);
  if (op == "*") return __builtin_mul_overflow(a, b, &result) ? ValueOr(TooLarge(op)) : Value::Int(result);
  if (op == "**") return IntPower(a, b);
  if (b == 0) return InvalidArgument("division by zero");
  if (op == "/") return Value::Float(static_cast<double>(a) / static_cast<double>(b));
  if (b == -1) {  // INT64_MIN / -1 does not fit
    return op == "%" ? Value::Int(0) : CalculateInt("-", 0, a);
  }
  return Value::Int(op == "//" ? FloorDivide(a, b) : FloorRemainder(a, b));
}

ValueOr CalculateFloat(std::string_view op, double a, double b) {
  if (op == "+") return Value::Float(a + b);
  if (op == "-") return Value::Float(a - b);
  if (op == "*") return Value::Float(a * b);
  if (op == "**") {
    if (a < 0 && b != std::floor(b)) return InvalidArgument("a power that is complex is not supported");
    return Value::Float(std::pow(a, b));
  }
  if (b == 0) return InvalidArgument("float division by zero");
  if (op == "/") return Value::Float(a / b);
  if (op == "//") return Value::Float(std::floor(a / b));
  double rest = std::fmod(a, b);
  if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
  return Value::Float(rest);
}

ValueOr RepeatText(const std::string& text, int64_t count) {
  if (count <= 0 || text.empty()) return Value::String("");
  if (static_cast<uint64_t>(count) > kTextBytesMax / text.size()) return TooLarge("*");
  std::string out;
  out.reserve(text.size() * count);
  for (int64_t i = 0; i < count; ++i) out += text;
  return Value::String(std::move(out));
}

ValueOr Add(const Value& left, const Value& right) {
  if (left.is_string() && right.is_string()) {
    if (left.AsString().size() + right.AsString().size() > kTextBytesMax) return TooLarge("+");
    return Value::String(left.AsString() + right.AsString());
  }
  List items = left.AsList();
  if (items.size() + right.AsList().size() > kListItemsMax) return TooLarge("+");
  items.insert(items.end(), right.AsList().begin(), right.AsList().end());
  return left.kind() == Value::Kind::kList ? Value::MakeList(std::move(items)) : Value::MakeTuple(std::move(items));
}

}  // namespace

ValueOr Calculate(std::string_view op, const Value& left, const Value& right) {
  for (const Value* value : {&left, &right}) {
    if (value->is_undefined()) return InvalidArgument("{}", value->hint());
  }
  if (left.is_integer() && right.is_integer()) return CalculateInt(op, left.AsInt(), right.AsInt());
  if (left.is_number() && right.is_number()) return CalculateFloat(op, left.AsNumber(), right.AsNumber());
  if (op == "+" && left.kind() == right.kind() && (left.is_string() || left.is_sequence())) return Add(left, right);
  if (op == "*" && left.is_string() && right.is_integer()) return RepeatText(left.AsString(), right.AsInt());
  if (op == "*" && left.is_integer() && right.is_string()) return RepeatText(right.AsString(), left.AsInt());
  return InvalidArgument("unsupported operand type(s) for {}: '{}' and '{}'", op, left.TypeName(), right.TypeName());
}

ValueOr Negate(const Value& value) {
  if (value.is_float()) return Value::Float(-value.AsNumber());
  if (value.is_integer()) return CalculateInt("-", 0, value.AsInt());
  if (value.is_undefined()) return InvalidArgument("{}", value.hint());
  return InvalidArgument("bad operand type for unary -: '{}'", value.TypeName());
}

namespace {

// A bound of a slice over `length` items, between `low` and `high`.
absl::StatusOr<int64_t> Bound(const Value& value, int64_t fallback, int64_t length, int64_t low, int64_t high) {
  if (value.is_none()) return fallback;
  if (!value.is_integer()) return InvalidArgument("slice indices must be integers or None");
  int64_t bound = value.AsInt();
  if (bound < 0) bound += length;
  return std::min(std::max(bound, low), high);
}

}  // namespace

namespace {

// Characters [begin, end) of a text.
std::string TextSlice(const std::string& text, int64_t begin, int64_t end) {
  size_t pos = 0;
  size_t first = 0;
  for (int64_t i = 0; i < end; ++i) {
    if (i == begin) first = pos;
    pos += text::DecodeUtf8(text, pos).num_bytes;
  }
  return begin < end ? text.substr(first, pos - first) : std::string();
}

}  // namespace

ValueOr Slice(const Value& object, const Value& start, const Value& stop, const Value& step) {
  if (object.is_undefined()) return InvalidArgument("{}", object.hint());
  if (!object.is_string() && !object.is_sequence()) {
    return InvalidArgument("a {} cannot be sliced", object.TypeName());
  }
  int64_t stride = 1;
  if (!step.is_none()) {
    if (!step.is_integer()) return InvalidArgument("slice indices must be integers or None");
    if (step.AsInt() == 0) return InvalidArgument("slice step cannot be zero");
    stride = std::min<int64_t>(std::max<int64_t>(step.AsInt(), -(1LL << 40)), 1LL << 40);
  }
  const int64_t length =
      object.is_string() ? LengthOf(object.AsString()) : static_cast<int64_t>(object.AsList().size());
  const int64_t low = stride > 0 ? 0 : -1;
  const int64_t high = stride > 0 ? length : length - 1;
  SPLICE_ASSIGN_OR_RETURN(const int64_t begin, Bound(start, stride > 0 ? low : high, length, low, high));
  SPLICE_ASSIGN_OR_RETURN(const int64_t end, Bound(stop, stride > 0 ? high : low, length, low, high));
  if (object.is_string() && stride == 1) return Value::String(TextSlice(object.AsString(), begin, end));
  List characters;
  if (object.is_string()) {
    SPLICE_ASSIGN_OR_RETURN(characters, Iterate(object));
  }
  const List& items = object.is_string() ? characters : object.AsList();
  List selected;
  for (int64_t i = begin; stride > 0 ? i < end : i > end; i += stride) selected.push_back(items[i]);
  if (object.kind() == Value::Kind::kList) return Value::MakeList(std::move(selected));
  if (object.kind() == Value::Kind::kTuple) return Value::MakeTuple(std::move(selected));
  std::string text;
  for (const Value& character : selected) text += character.AsString();
  return Value::String(std::move(text));
}

}  // namespace spl::tokenizer::jinja
