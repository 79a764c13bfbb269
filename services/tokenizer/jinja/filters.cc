// The filters: "value | name".
#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "services/base/status.h"
#include "services/tokenizer/jinja/builtins.h"
#include "services/tokenizer/jinja/limits.h"
#include "services/tokenizer/jinja/sorting.h"
#include "services/tokenizer/jinja/text.h"

namespace spl::tokenizer::jinja {
namespace {

using ValueOr = absl::StatusOr<Value>;
using FilterFn = ValueOr (*)(const Value&, const Arguments&);

// The text of an argument; nullopt: it is not given.
absl::StatusOr<std::optional<std::string>> TextArgument(const Arguments& arguments, size_t idx, std::string_view name) {
  const Value* value = arguments.Find(idx, name);
  if (value == nullptr || value->is_none()) return std::optional<std::string>();
  SPLICE_ASSIGN_OR_RETURN(std::string text, ToText(*value));
  return std::optional<std::string>(std::move(text));
}

ValueOr Trim(const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("trim", 1, {"chars"}));
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ToText(value));
  SPLICE_ASSIGN_OR_RETURN(const std::optional<std::string> characters, TextArgument(arguments, 0, "chars"));
  return Value::String(Strip(text, characters ? &*characters : nullptr, StripSide::kBoth));
}

template <Case mode>
ValueOr CaseFilter(const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("this filter", 0, {}));
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ToText(value));
  SPLICE_ASSIGN_OR_RETURN(std::string changed, ChangeCase(text, mode));
  return Value::String(std::move(changed));
}

ValueOr Length(const Value& value, const Arguments&) {
  if (value.is_undefined()) return Value::Int(0);
  if (value.is_string()) return Value::Int(LengthOf(value.AsString()));
  if (value.is_sequence()) return Value::Int(static_cast<int64_t>(value.AsList().size()));
  if (value.is_dict()) return Value::Int(static_cast<int64_t>(value.AsDict().items.size()));
  return InvalidArgument("object of type '{}' has no len()", value.TypeName());
}

absl::StatusOr<bool> Flag(const Arguments& arguments, size_t idx, std::string_view name) {
  const Value* value = arguments.Find(idx, name);
  return value != nullptr && value->Truthy();
}

ValueOr ToJsonFilter(const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("tojson", 4, {"ensure_ascii", "indent", "separators", "sort_keys"}));
  if (const Value* separators = arguments.Find(2, "separators"); separators != nullptr && !separators->is_none()) {
    return InvalidArgument("tojson with separators is not supported");
  }
  JsonOptions options;
  SPLICE_ASSIGN_OR_RETURN(options.ensure_ascii, Flag(arguments, 0, "ensure_ascii"));
  SPLICE_ASSIGN_OR_RETURN(options.sort_keys, Flag(arguments, 3, "sort_keys"));
  if (const Value* indent = arguments.Find(1, "indent"); indent != nullptr && !indent->is_none()) {
    if (!indent->is_integer() || indent->AsInt() < 0 || indent->AsInt() > 16) {
      return InvalidArgument("tojson takes an indent from 0 to 16");
    }
    options.indent = static_cast<int>(indent->AsInt());
  }
  SPLICE_ASSIGN_OR_RETURN(std::string json, ToJson(value, options));
  return Value::String(std::move(json));
}

ValueOr Join(const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("join", 2, {"d", "attribute"}));
  SPLICE_ASSIGN_OR_RETURN(const std::optional<std::string> separator, TextArgument(arguments, 0, "d"));
  const Value* attribute = arguments.Find(1, "attribute");
  SPLICE_ASSIGN_OR_RETURN(const List items, Iterate(value));
  std::string joined;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0 && separator) joined += *separator;
    Value item = items[i];
    if (attribute != nullptr && !attribute->is_none()) {
      SPLICE_ASSIGN_OR_RETURN(item, FollowPath(item, *attribute));
    }
    SPLICE_ASSIGN_OR_RETURN(const std::string text, ToText(item));
    joined += text;
    if (joined.size() > kTextBytesMax) return InvalidArgument("join makes more than {} bytes", kTextBytesMax);
  }
  return Value::String(std::move(joined));
}

ValueOr ListFilter(const Value& value, const Arguments&) {
  SPLICE_ASSIGN_OR_RETURN(List items, Iterate(value));
  return Value::MakeList(std::move(items));
}

ValueOr Items(const Value& value, const Arguments& arguments) {
  if (value.is_undefined()) return Value::MakeList({});
  if (!value.is_dict()) return InvalidArgument("Can only get item pairs from a mapping.");
  return CallMethod("items", value, arguments);
}

// Lists and texts are not iterated, because their ends can be read directly.
ValueOr First(const Value& value, const Arguments&) {
  if (value.is_string() && !value.AsString().empty())
    return Value::String(std::string(FirstCharacter(value.AsString())));
  if (value.is_sequence() && !value.AsList().empty()) return value.AsList().front();
  SPLICE_ASSIGN_OR_RETURN(const List items, Iterate(value));
  return items.empty() ? Value::Undefined("No first item, sequence was empty.") : items.front();
}

ValueOr Last(const Value& value, const Arguments&) {
  if (value.is_string() && !value.AsString().empty())
    return Value::String(std::string(LastCharacter(value.AsString())));
  if (value.is_sequence() && !value.AsList().empty()) return value.AsList().back();
  SPLICE_ASSIGN_OR_RETURN(const List items, Iterate(value));
  return items.empty() ? Value::Undefined("No last item, sequence was empty.") : items.back();
}

ValueOr Reverse(const Value& value, const Arguments&) {
  SPLICE_ASSIGN_OR_RETURN(List items, Iterate(value));
  std::reverse(items.begin(), items.end());
  if (!value.is_string()) return Value::MakeList(std::move(items));
  std::string text;
  for (const Value& item : items) text += item.AsString();
  return Value::String(std::move(text));
}

ValueOr ReplaceFilter(const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("replace", 3, {"old", "new", "count"}));
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ToText(value));
  SPLICE_ASSIGN_OR_RETURN(const std::optional<std::string> from, TextArgument(arguments, 0, "old"));
  SPLICE_ASSIGN_OR_RETURN(const std::optional<std::string> to, TextArgument(arguments, 1, "new"));
  if (!from || !to) return InvalidArgument("replace needs what to replace and by what");
  Arguments rest;
  rest.positional = {Value::String(*from), Value::String(*to)};
  const Value* count = arguments.Find(2, "count");
  if (count != nullptr && !count->is_none()) rest.positional.push_back(*count);
  return CallMethod("replace", Value::String(text), rest);
}

ValueOr Default(const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("default", 2, {"default_value", "boolean"}));
  SPLICE_ASSIGN_OR_RETURN(const bool boolean, Flag(arguments, 1, "boolean"));
  if (!value.is_undefined() && !(boolean && !value.Truthy())) return value;
  const Value* fallback = arguments.Find(0, "default_value");
  return fallback != nullptr ? *fallback : Value::String("");
}

// select, reject, selectattr, rejectattr. `num_path`: 1 if the first argument names an attribute, otherwise 0.
template <bool keep, size_t num_path>
ValueOr Select(const Value& value, const Arguments& arguments) {
  if (!value.Truthy()) return Value::MakeList({});  // None, too
  if (arguments.positional.size() < num_path || !arguments.named.empty()) {
    return InvalidArgument("the filter needs an attribute");
  }
  std::string test;
  Arguments rest;
  if (arguments.positional.size() > num_path) {
    if (!arguments.positional[num_path].is_string()) return InvalidArgument("the name of a test must be a string");
    test = arguments.positional[num_path].AsString();
    rest.positional.assign(arguments.positional.begin() + num_path + 1, arguments.positional.end());
  }
  SPLICE_ASSIGN_OR_RETURN(const List items, Iterate(value));
  List selected;
  for (const Value& item : items) {
    Value subject = item;
    if (num_path == 1) {
      SPLICE_ASSIGN_OR_RETURN(subject, FollowPath(item, arguments.positional[0]));
    }
    bool passes = subject.Truthy();
    if (!test.empty()) {
      SPLICE_ASSIGN_OR_RETURN(passes, ApplyTest(test, subject, rest));
    }
    if (passes == keep) selected.push_back(item);
  }
  return Value::MakeList(std::move(selected));
}

ValueOr MapAttribute(const List& items, const Value& attribute, const Value* fallback) {
  List mapped;
  for (const Value& item : items) {
    SPLICE_ASSIGN_OR_RETURN(Value value, FollowPath(item, attribute));
    mapped.push_back(value.is_undefined() && fallback != nullptr ? *fallback : std::move(value));
  }
  return Value::MakeList(std::move(mapped));
}

ValueOr Map(const Value& value, const Arguments& arguments) {
  if (!value.Truthy()) return Value::MakeList({});  // None, too
  SPLICE_ASSIGN_OR_RETURN(const List items, Iterate(value));
  if (arguments.positional.empty()) {
    SPLICE_RETURN_IF_ERROR(arguments.Check("map", 0, {"attribute", "default"}));
    const Value* attribute = arguments.Find(0, "attribute");
    if (attribute == nullptr) return InvalidArgument("map needs a filter or an attribute");
    return MapAttribute(items, *attribute, arguments.Find(1, "default"));
  }
  if (!arguments.positional[0].is_string()) return InvalidArgument("the name of a filter must be a string");
  const std::string& filter = arguments.positional[0].AsString();
  if (filter == "map") return InvalidArgument("map of map is not supported");
  Arguments rest = arguments;
  rest.positional.erase(rest.positional.begin());
  List mapped;
  for (const Value& item : items) {
    SPLICE_ASSIGN_OR_RETURN(Value result, ApplyFilter(filter, item, rest));
    mapped.push_back(std::move(result));
  }
  return Value::MakeList(std::move(mapped));
}

ValueOr StringFilter(const Value& value, const Arguments&) {
  SPLICE_ASSIGN_OR_RETURN(std::string text, ToText(value));
  return Value::String(std::move(text));
}

// int(text) and float(text); a text that is no number gives the default, 0.
ValueOr IntFilter(const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("int", 1, {"default"}));
  if (value.is_integer()) return Value::Int(value.AsInt());
  double number = 0;
  bool valid = value.is_float();
  if (valid) number = value.AsNumber();
  if (value.is_string()) {
    const std::string text = Strip(value.AsString(), nullptr, StripSide::kBoth);
    int64_t integer = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), integer);
    if (error == std::errc() && end == text.data() + text.size()) return Value::Int(integer);
    const auto [float_end, float_error] = std::from_chars(text.data(), text.data() + text.size(), number);
    valid = float_error == std::errc() && float_end == text.data() + text.size();
  }
  if (valid && std::abs(number) < 9e18) return Value::Int(static_cast<int64_t>(number));
  const Value* fallback = arguments.Find(0, "default");
  return fallback != nullptr ? *fallback : Value::Int(0);
}

ValueOr FloatFilter(const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("float", 1, {"default"}));
  if (value.is_number()) return Value::Float(value.AsNumber());
  if (value.is_string()) {
    const std::string text = Strip(value.AsString(), nullptr, StripSide::kBoth);
    double number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc() && end == text.data() + text.size()) return Value::Float(number);
  }
  const Value* fallback = arguments.Find(0, "default");
  return fallback != nullptr ? *fallback : Value::Float(0);
}

ValueOr Abs(const Value& value, const Arguments&) {
  if (value.is_float()) return Value::Float(std::abs(value.AsNumber()));
  if (!value.is_integer() || value.AsInt() == INT64_MIN) {
    return InvalidArgument("bad operand type for abs(): '{}'", value.TypeName());
  }
  return Value::Int(std::abs(value.AsInt()));
}

ValueOr Unique(const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("unique", 0, {}));
  SPLICE_ASSIGN_OR_RETURN(const List items, Iterate(value));
  List kept;
  std::vector<Value> keys;  // strings are compared without case
  for (const Value& item : items) {
    Value key = item;
    if (item.is_string()) {
      SPLICE_ASSIGN_OR_RETURN(std::string lower, ChangeCase(item.AsString(), Case::kLower));
      key = Value::String(std::move(lower));
    }
    if (keys.size() > 10'000) return InvalidArgument("unique is limited to 10000 items");
    if (std::any_of(keys.begin(), keys.end(), [&](const Value& other) { return Equal(key, other); })) continue;
    keys.push_back(std::move(key));
    kept.push_back(item);
  }
  return Value::MakeList(std::move(kept));
}

// The lines after the first are indented; `first` and `blank` ask for the first one and for empty ones, too.
ValueOr Indent(const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("indent", 3, {"width", "first", "blank"}));
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ToText(value));
  std::string indention(4, ' ');
  if (const Value* width = arguments.Find(0, "width"); width != nullptr) {
    if (!width->is_string() && (!width->is_integer() || width->AsInt() > 256))
      return InvalidArgument("indent takes a text or a width of at most 256");
    indention = width->is_string() ? width->AsString()
                                   : std::string(static_cast<size_t>(std::max<int64_t>(0, width->AsInt())), ' ');
  }
  SPLICE_ASSIGN_OR_RETURN(const bool first, Flag(arguments, 1, "first"));
  SPLICE_ASSIGN_OR_RETURN(const bool blank, Flag(arguments, 2, "blank"));
  SPLICE_ASSIGN_OR_RETURN(const std::vector<std::string> lines, SplitLines(text + "\n"));
  std::string indented = first ? indention : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) indented += '\n';
    if (i > 0 && (blank || !lines[i].empty())) indented += indention;
    indented += lines[i];
    if (indented.size() > kTextBytesMax) return InvalidArgument("indent makes more than {} bytes", kTextBytesMax);
  }
  return Value::String(std::move(indented));
}

ValueOr FromJson(const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("from_json", 0, {}));
  if (!value.is_string()) return InvalidArgument("from_json takes a text, not {}", value.TypeName());
  return FromJsonText(value.AsString(), "the text");
}

ValueOr Same(const Value& value, const Arguments&) { return value; }

const std::map<std::string_view, FilterFn>& Filters() {
  static const auto* const filters = new std::map<std::string_view, FilterFn>{
      {"abs", Abs},
      {"capitalize", CaseFilter<Case::kCapitalize>},
      {"count", Length},
      {"d", Default},
      {"default", Default},
      {"dictsort", DictSortFilter},
      {"first", First},
      {"float", FloatFilter},
      {"from_json", FromJson},
      {"fromjson", FromJson},
      {"indent", Indent},
      {"int", IntFilter},
      {"items", Items},
      {"join", Join},
      {"last", Last},
      {"length", Length},
      {"list", ListFilter},
      {"lower", CaseFilter<Case::kLower>},
      {"map", Map},
      {"max", MaxFilter},
      {"min", MinFilter},
      {"reject", Select<false, 0>},
      {"rejectattr", Select<false, 1>},
      {"replace", ReplaceFilter},
      {"reverse", Reverse},
      {"safe", Same},
      {"select", Select<true, 0>},
      {"selectattr", Select<true, 1>},
      {"sort", SortFilter},
      {"string", StringFilter},
      {"title", CaseFilter<Case::kJinjaTitle>},
      {"tojson", ToJsonFilter},
      {"trim", Trim},
      {"unique", Unique},
      {"upper", CaseFilter<Case::kUpper>},
  };
  return *filters;
}

}  // namespace

bool IsFilter(std::string_view name) { return Filters().contains(name); }

absl::StatusOr<Value> ApplyFilter(std::string_view name, const Value& input, const Arguments& arguments) {
  const auto it = Filters().find(name);
  if (it == Filters().end()) return InvalidArgument("the filter '{}' is not supported", name);
  return it->second(input, arguments);
}

}  // namespace spl::tokenizer::jinja
