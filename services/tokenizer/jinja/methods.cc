// Methods of strings, dicts and loops, and the global functions.
#include <ctime>
#include <map>

#include "services/base/status.h"
#include "services/tokenizer/jinja/builtins.h"
#include "services/tokenizer/jinja/limits.h"
#include "services/tokenizer/jinja/loop_state.h"
#include "services/tokenizer/jinja/text.h"

namespace spl::tokenizer::jinja {
namespace {

using ValueOr = absl::StatusOr<Value>;
using MethodFn = ValueOr (*)(const Value&, const Arguments&);

// A string argument; null: it is not given, or none.
absl::StatusOr<const std::string*> Text(const Arguments& arguments, size_t idx, std::string_view name = "") {
  const Value* value = arguments.Find(idx, name);
  if (value == nullptr || value->is_none()) return nullptr;
  if (!value->is_string()) return InvalidArgument("the argument must be a string, not {}", value->TypeName());
  return &value->AsString();
}

absl::StatusOr<const std::string*> RequiredText(const Arguments& arguments, size_t idx) {
  SPLICE_ASSIGN_OR_RETURN(const std::string* text, Text(arguments, idx));
  if (text == nullptr) return InvalidArgument("a string argument is missing");
  return text;
}

absl::StatusOr<int64_t> Limit(const Arguments& arguments, size_t idx, std::string_view name) {
  const Value* value = arguments.Find(idx, name);
  if (value == nullptr) return -1;
  if (!value->is_integer()) return InvalidArgument("{} must be an integer, not {}", name, value->TypeName());
  return value->AsInt();
}

Value ListOf(const std::vector<std::string>& texts) {
  List items;
  for (const std::string& text : texts) items.push_back(Value::String(text));
  return *Value::MakeList(std::move(items));
}

template <StripSide side>
ValueOr StripMethod(const Value& object, const Arguments& arguments) {
  SPLICE_ASSIGN_OR_RETURN(const std::string* characters, Text(arguments, 0));
  return Value::String(Strip(object.AsString(), characters, side));
}

template <Case mode>
ValueOr CaseMethod(const Value& object, const Arguments&) {
  SPLICE_ASSIGN_OR_RETURN(std::string text, ChangeCase(object.AsString(), mode));
  return Value::String(std::move(text));
}

// startswith and endswith take one string or a tuple of them.
template <bool at_start>
ValueOr Affix(const Value& object, const Arguments& arguments) {
  if (arguments.positional.size() != 1) return InvalidArgument("startswith and endswith take one argument here");
  const Value& argument = arguments.positional[0];
  const List candidates = argument.kind() == Value::Kind::kTuple ? argument.AsList() : List{argument};
  for (const Value& candidate : candidates) {
    if (!candidate.is_string()) return InvalidArgument("the argument must be a string, not {}", candidate.TypeName());
    const std::string& text = object.AsString();
    if (at_start ? text.starts_with(candidate.AsString()) : text.ends_with(candidate.AsString()))
      return Value::Bool(true);
  }
  return Value::Bool(false);
}

template <bool from_right>
ValueOr SplitMethod(const Value& object, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("split", 2, {"sep", "maxsplit"}));
  SPLICE_ASSIGN_OR_RETURN(const std::string* separator, Text(arguments, 0, "sep"));
  SPLICE_ASSIGN_OR_RETURN(const int64_t max_splits, Limit(arguments, 1, "maxsplit"));
  auto parts = from_right ? SplitFromRight(object.AsString(), separator, max_splits)
                          : Split(object.AsString(), separator, max_splits);
  if (!parts.ok()) return parts.status();
  return ListOf(*parts);
}

ValueOr SplitLinesMethod(const Value& object, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("splitlines", 0, {}));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<std::string> lines, SplitLines(object.AsString()));
  return ListOf(lines);
}

int64_t CountOf(std::string_view text, std::string_view part) {
  int64_t count = 0;
  for (size_t pos = FindText(text, part, 0); pos != std::string_view::npos;
       pos = FindText(text, part, pos + part.size())) {
    ++count;
  }
  return count;
}

ValueOr ReplaceMethod(const Value& object, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("replace", 3, {"count"}));
  SPLICE_ASSIGN_OR_RETURN(const std::string* from, RequiredText(arguments, 0));
  SPLICE_ASSIGN_OR_RETURN(const std::string* to, RequiredText(arguments, 1));
  SPLICE_ASSIGN_OR_RETURN(const int64_t max_count, Limit(arguments, 2, "count"));
  if (!from->empty() && to->size() > from->size() &&
      static_cast<uint64_t>(CountOf(object.AsString(), *from)) * to->size() > kTextBytesMax) {
    return InvalidArgument("replace makes more than {} bytes", kTextBytesMax);
  }
  SPLICE_ASSIGN_OR_RETURN(std::string text, Replace(object.AsString(), *from, *to, max_count));
  return Value::String(std::move(text));
}

ValueOr FindMethod(const Value& object, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("find", 1, {}));
  SPLICE_ASSIGN_OR_RETURN(const std::string* part, RequiredText(arguments, 0));
  const size_t found = FindText(object.AsString(), *part, 0);
  if (found == std::string::npos) return Value::Int(-1);
  return Value::Int(LengthOf(std::string_view(object.AsString()).substr(0, found)));
}

ValueOr CountMethod(const Value& object, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("count", 1, {}));
  SPLICE_ASSIGN_OR_RETURN(const std::string* part, RequiredText(arguments, 0));
  if (part->empty()) return Value::Int(LengthOf(object.AsString()) + 1);
  return Value::Int(CountOf(object.AsString(), *part));
}

template <bool at_start>
ValueOr RemoveAffix(const Value& object, const Arguments& arguments) {
  SPLICE_ASSIGN_OR_RETURN(const std::string* affix, RequiredText(arguments, 0));
  std::string_view text = object.AsString();
  if (at_start && text.starts_with(*affix)) text.remove_prefix(affix->size());
  if (!at_start && text.ends_with(*affix)) text.remove_suffix(affix->size());
  return Value::String(std::string(text));
}

ValueOr JoinMethod(const Value& object, const Arguments& arguments) {
  if (arguments.positional.size() != 1) return InvalidArgument("join takes one argument");
  SPLICE_ASSIGN_OR_RETURN(const List items, Iterate(arguments.positional[0]));
  for (const Value& item : items) {
    if (!item.is_string()) return InvalidArgument("join: expected str instance, {} found", item.TypeName());
  }
  Arguments separator;
  separator.positional.push_back(object);
  return ApplyFilter("join", arguments.positional[0], separator);
}

// The argument that a field of a format names: "" is the next one, "1" the second, others have a name.
absl::StatusOr<const Value*> FormatArgument(std::string_view field, const Arguments& arguments, int64_t* next) {
  const bool is_number = field.find_first_not_of("0123456789") == std::string_view::npos && field.size() < 4;
  if (is_number && *next != 0 && field.empty() != (*next > 0)) {
    return InvalidArgument("cannot switch between manual field specification and automatic field numbering");
  }
  size_t idx = SIZE_MAX;
  if (field.empty()) {
    idx = static_cast<size_t>((*next)++);
  } else if (is_number) {
    idx = std::stoul(std::string(field));
    *next = -1;  // from here on they are numbered by hand
  }
  const Value* const value = arguments.Find(idx, is_number ? std::string_view() : field);
  if (value == nullptr) return InvalidArgument("format has no argument for '{{{}}}' here", field);
  return value;
}

// "{} {name}".format(…), or with numbers; anything behind a colon or an exclamation mark is refused.
ValueOr FormatMethod(const Value& object, const Arguments& arguments) {
  const std::string_view format = object.AsString();
  std::string text;
  int64_t next = 0;
  for (size_t i = 0; i < format.size(); ++i) {
    const bool doubled = i + 1 < format.size() && format[i + 1] == format[i];
    if ((format[i] != '{' && format[i] != '}') || doubled) {
      text += format[i];
      i += format[i] == '{' || format[i] == '}' ? 1 : 0;
      continue;
    }
    const size_t end = format.find('}', i);
    if (format[i] == '}' || end == std::string_view::npos)
      return InvalidArgument("Single '{}' encountered in format string", format.substr(i, 1));
    SPLICE_ASSIGN_OR_RETURN(const Value* const value,
                            FormatArgument(format.substr(i + 1, end - i - 1), arguments, &next));
    SPLICE_ASSIGN_OR_RETURN(const std::string part, ToText(*value));
    text += part;
    if (text.size() > kTextBytesMax) return InvalidArgument("format makes more than {} bytes", kTextBytesMax);
    i = end;
  }
  return Value::String(std::move(text));
}

ValueOr Items(const Value& object, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("items", 0, {}));
  List pairs;
  for (const auto& item : object.AsDict().items) {
    SPLICE_ASSIGN_OR_RETURN(Value pair, Value::MakeTuple({Value::String(item.first), item.second}));
    pairs.push_back(std::move(pair));
  }
  return Value::MakeList(std::move(pairs));
}

ValueOr Keys(const Value& object, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("keys", 0, {}));
  SPLICE_ASSIGN_OR_RETURN(List keys, Iterate(object));
  return Value::MakeList(std::move(keys));
}

ValueOr Values(const Value& object, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("values", 0, {}));
  List values;
  for (const auto& item : object.AsDict().items) values.push_back(item.second);
  return Value::MakeList(std::move(values));
}

ValueOr Get(const Value& object, const Arguments& arguments) {
  if (arguments.positional.empty() || arguments.positional.size() > 2 || !arguments.named.empty()) {
    return InvalidArgument("get takes a key and a default");
  }
  const Value& key = arguments.positional[0];
  const Value* found = key.is_string() ? object.AsDict().Find(key.AsString()) : nullptr;
  if (found != nullptr) return *found;
  return arguments.positional.size() == 2 ? arguments.positional[1] : Value::None();
}

ValueOr Cycle(const Value& object, const Arguments& arguments) {
  if (arguments.positional.empty()) return InvalidArgument("no items for cycling given");
  return arguments.positional[object.AsLoop().idx % arguments.positional.size()];
}

const std::map<std::string_view, MethodFn>& StringMethods() {
  static const auto* const methods = new std::map<std::string_view, MethodFn>{
      {"capitalize", CaseMethod<Case::kCapitalize>},
      {"count", CountMethod},
      {"endswith", Affix<false>},
      {"find", FindMethod},
      {"format", FormatMethod},
      {"join", JoinMethod},
      {"lower", CaseMethod<Case::kLower>},
      {"lstrip", StripMethod<StripSide::kLeft>},
      {"removeprefix", RemoveAffix<true>},
      {"removesuffix", RemoveAffix<false>},
      {"replace", ReplaceMethod},
      {"rsplit", SplitMethod<true>},
      {"rstrip", StripMethod<StripSide::kRight>},
      {"split", SplitMethod<false>},
      {"splitlines", SplitLinesMethod},
      {"startswith", Affix<true>},
      {"strip", StripMethod<StripSide::kBoth>},
      {"title", CaseMethod<Case::kTitle>},
      {"upper", CaseMethod<Case::kUpper>},
  };
  return *methods;
}

const std::map<std::string_view, MethodFn>& DictMethods() {
  static const auto* const methods =
      new std::map<std::string_view, MethodFn>{{"get", Get}, {"items", Items}, {"keys", Keys}, {"values", Values}};
  return *methods;
}

// raise_exception(message), by which a template refuses its input.
ValueOr RaiseException(const Arguments& arguments) {
  const Value* message = arguments.Find(0, "message");
  if (message == nullptr) return InvalidArgument("raise_exception needs a message");
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ToText(*message));
  return InvalidArgument("{}", text);
}

ValueOr StrftimeNow(const Arguments& arguments) {
  const Value* format = arguments.Find(0, "format");
  if (format == nullptr || !format->is_string()) return InvalidArgument("strftime_now needs a format");
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char buffer[1024];
  const size_t num_bytes = std::strftime(buffer, sizeof(buffer), format->AsString().c_str(), &local);
  if (num_bytes == 0 && !format->AsString().empty()) return InvalidArgument("strftime_now: the format gives no text");
  return Value::String(std::string(buffer, num_bytes));
}

ValueOr Range(const Arguments& arguments) {
  int64_t numbers[3] = {0, 0, 1};
  const size_t num_given = arguments.positional.size();
  if (num_given < 1 || num_given > 3 || !arguments.named.empty()) return InvalidArgument("range takes 1 to 3 integers");
  for (size_t i = 0; i < num_given; ++i) {
    const Value& value = arguments.positional[i];
    if (!value.is_integer() || std::abs(static_cast<double>(value.AsInt())) > 1e15) {
      return InvalidArgument("range takes integers");
    }
    numbers[num_given == 1 ? 1 : i] = value.AsInt();
  }
  if (numbers[2] == 0) return InvalidArgument("range() arg 3 must not be zero");
  List items;
  for (int64_t i = numbers[0]; numbers[2] > 0 ? i < numbers[1] : i > numbers[1]; i += numbers[2]) {
    if (static_cast<int64_t>(items.size()) >= kRangeMax)
      return InvalidArgument("Range too big. The sandbox blocks ranges larger than MAX_RANGE ({}).", kRangeMax);
    items.push_back(Value::Int(i));
  }
  return Value::MakeList(std::move(items));
}

// namespace(a=1) and dict(a=1); both also take one dict.
absl::StatusOr<Dict> DictArgument(std::string_view callee, const Arguments& arguments) {
  Dict dict;
  if (!arguments.positional.empty()) {
    if (arguments.positional.size() > 1 || !arguments.positional[0].is_dict()) {
      return InvalidArgument("{} takes named arguments, or one dict", callee);
    }
    dict = arguments.positional[0].AsDict();
  }
  for (const auto& argument : arguments.named) dict.Set(argument.first, argument.second);
  return dict;
}

ValueOr Namespace(const Arguments& arguments) {
  SPLICE_ASSIGN_OR_RETURN(Dict dict, DictArgument("namespace", arguments));
  return Value::MakeNamespace(std::move(dict));
}

ValueOr DictFunction(const Arguments& arguments) {
  SPLICE_ASSIGN_OR_RETURN(Dict dict, DictArgument("dict", arguments));
  return Value::MakeDict(std::move(dict));
}

using FunctionFn = ValueOr (*)(const Arguments&);

const std::map<std::string_view, FunctionFn>& Functions() {
  static const auto* const functions = new std::map<std::string_view, FunctionFn>{
      {"dict", DictFunction}, {"namespace", Namespace},      {"raise_exception", RaiseException},
      {"range", Range},       {"strftime_now", StrftimeNow},
  };
  return *functions;
}

}  // namespace

bool IsMethod(std::string_view name) {
  return name == "cycle" || name == "append" || name == "pop" || StringMethods().contains(name) ||
         DictMethods().contains(name);
}

bool IsFunction(std::string_view name) { return Functions().contains(name); }

ValueOr CallMethod(std::string_view name, const Value& object, const Arguments& arguments) {
  if (object.is_undefined()) return InvalidArgument("{}", object.hint());
  const auto& methods = object.is_dict() ? DictMethods() : StringMethods();
  const auto it = methods.find(name);
  if ((object.is_dict() || object.is_string()) && it != methods.end()) return it->second(object, arguments);
  if (object.kind() == Value::Kind::kLoop && name == "cycle") return Cycle(object, arguments);
  return InvalidArgument("'{} object' has no method '{}'", object.TypeName(), name);
}

ValueOr CallFunction(std::string_view name, const Arguments& arguments) {
  const auto it = Functions().find(name);
  if (it == Functions().end()) return InvalidArgument("'{}' is undefined", name);
  return it->second(arguments);
}

}  // namespace spl::tokenizer::jinja
