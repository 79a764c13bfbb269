#include "services/tokenizer/jinja/builtins.h"

#include <algorithm>

#include "services/base/status.h"
#include "services/text/utf8.h"
#include "services/tokenizer/jinja/loop_state.h"
#include "services/tokenizer/jinja/text.h"

namespace spl::tokenizer::jinja {

const Value* Arguments::Find(size_t idx, std::string_view name) const {
  if (idx < positional.size()) return &positional[idx];
  for (const auto& argument : named) {
    if (argument.first == name) return &argument.second;
  }
  return nullptr;
}

absl::Status Arguments::Check(std::string_view callee, size_t num_max,
                              const std::vector<std::string_view>& names) const {
  if (positional.size() > num_max) {
    return InvalidArgument("{} takes at most {} arguments, {} were given", callee, num_max, positional.size());
  }
  for (const auto& argument : named) {
    if (std::find(names.begin(), names.end(), argument.first) == names.end()) {
      return InvalidArgument("{} has no argument '{}' here", callee, argument.first);
    }
  }
  return absl::OkStatus();
}

namespace {

Value LoopAttribute(const LoopState& loop, std::string_view name) {
  const auto num_items = static_cast<int64_t>(loop.items.size());
  const auto idx = static_cast<int64_t>(loop.idx);
  if (name == "index") return Value::Int(idx + 1);
  if (name == "index0") return Value::Int(idx);
  if (name == "revindex") return Value::Int(num_items - idx);
  if (name == "revindex0") return Value::Int(num_items - idx - 1);
  if (name == "first") return Value::Bool(idx == 0);
  if (name == "last") return Value::Bool(idx + 1 == num_items);
  if (name == "length") return Value::Int(num_items);
  if (name == "depth") return Value::Int(1);
  if (name == "depth0") return Value::Int(0);
  if (name == "previtem") return idx > 0 ? loop.items[idx - 1] : Value::Undefined("there is no previous item");
  if (name == "nextitem") return idx + 1 < num_items ? loop.items[idx + 1] : Value::Undefined("there is no next item");
  return Value::Undefined(fmt::format("'loop' has no attribute '{}'", name));
}

bool IsDictMethod(std::string_view name) {
  for (const std::string_view method :
       {"items", "keys", "values", "get", "pop", "popitem", "update", "copy", "clear", "setdefault"}) {
    if (name == method) return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<Value> GetAttribute(const Value& object, std::string_view name) {
  switch (object.kind()) {
    case Value::Kind::kUndefined:
      return InvalidArgument("{}", object.hint());
    case Value::Kind::kLoop:
      return LoopAttribute(object.AsLoop(), name);
    case Value::Kind::kDict:
      if (IsDictMethod(name)) return Value::Callable(std::string(name));  // Python prefers the method
      [[fallthrough]];
    case Value::Kind::kNamespace:
      if (const Value* value = object.AsDict().Find(name)) return *value;
      return Value::Undefined(fmt::format("'{} object' has no attribute '{}'", object.TypeName(), name));
    case Value::Kind::kString:
      if (IsMethod(name)) return Value::Callable(std::string(name));
      [[fallthrough]];
    default:
      return Value::Undefined(fmt::format("'{} object' has no attribute '{}'", object.TypeName(), name));
  }
}

namespace {

absl::StatusOr<Value> ItemAt(const Value& object, int64_t idx) {
  const int64_t length =
      object.is_string() ? LengthOf(object.AsString()) : static_cast<int64_t>(object.AsList().size());
  if (idx < 0) idx += length;
  if (idx < 0 || idx >= length) {
    return Value::Undefined(fmt::format("'{} object' has no element {}", object.TypeName(), idx));
  }
  if (!object.is_string()) return object.AsList()[idx];
  const std::string& text = object.AsString();
  size_t pos = 0;
  for (int64_t i = 0; i < idx; ++i) pos += text::DecodeUtf8(text, pos).num_bytes;
  return Value::String(text.substr(pos, text::DecodeUtf8(text, pos).num_bytes));
}

}  // namespace

absl::StatusOr<Value> GetItem(const Value& object, const Value& key) {
  if (object.is_undefined()) return InvalidArgument("{}", object.hint());
  if (key.is_undefined()) return InvalidArgument("{}", key.hint());
  if ((object.is_sequence() || object.is_string()) && key.is_integer()) return ItemAt(object, key.AsInt());
  if (key.is_string()) {
    if (object.is_dict()) {
      if (const Value* value = object.AsDict().Find(key.AsString())) return *value;
    }
    return GetAttribute(object, key.AsString());
  }
  return Value::Undefined(fmt::format("'{} object' has no such element", object.TypeName()));
}

absl::StatusOr<bool> Contains(const Value& haystack, const Value& needle) {
  switch (haystack.kind()) {
    case Value::Kind::kUndefined:
      return false;
    case Value::Kind::kString:
      if (!needle.is_string()) {
        return InvalidArgument("'in <string>' requires string as left operand, not {}", needle.TypeName());
      }
      return FindText(haystack.AsString(), needle.AsString(), 0) != std::string_view::npos;
    case Value::Kind::kList:
    case Value::Kind::kTuple:
      return std::any_of(haystack.AsList().begin(), haystack.AsList().end(),
                         [&](const Value& item) { return Equal(item, needle); });
    case Value::Kind::kDict:
      return needle.is_string() && haystack.AsDict().Find(needle.AsString()) != nullptr;
    default:
      return InvalidArgument("argument of type '{}' is not iterable", haystack.TypeName());
  }
}

}  // namespace spl::tokenizer::jinja
