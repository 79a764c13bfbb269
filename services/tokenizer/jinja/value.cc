#include "services/tokenizer/jinja/value.h"

#include <algorithm>
#include <utility>

#include "services/base/status.h"
#include "services/text/utf8.h"
#include "services/tokenizer/jinja/limits.h"
#include "services/tokenizer/jinja/text.h"

namespace spl::tokenizer::jinja {
namespace {

constexpr size_t kIndexedFrom = 16;  // items of a dict; fewer are faster to search one by one

constexpr std::string_view kTypeNames[] = {
    "Undefined", "NoneType",         "bool",  "int",        "float", "str", "list", "tuple", "dict",
    "Namespace", "builtin_function", "Macro", "LoopContext"};

}  // namespace

size_t Dict::IndexOf(std::string_view key) const {
  if (!index_.empty()) {
    const auto it = index_.find(absl::string_view(key.data(), key.size()));
    return it == index_.end() ? items.size() : it->second;
  }
  size_t idx = 0;
  while (idx < items.size() && items[idx].first != key) ++idx;
  return idx;
}

const Value* Dict::Find(std::string_view key) const {
  const size_t idx = IndexOf(key);
  return idx < items.size() ? &items[idx].second : nullptr;
}

Value* Dict::Find(std::string_view key) { return const_cast<Value*>(std::as_const(*this).Find(key)); }

void Dict::Set(std::string_view key, Value value) {
  const size_t idx = IndexOf(key);
  if (idx < items.size()) {
    items[idx].second = std::move(value);
    return;
  }
  items.emplace_back(std::string(key), std::move(value));
  if (!index_.empty()) {
    index_.emplace(std::string(key), idx);
  } else if (items.size() == kIndexedFrom) {
    for (size_t i = 0; i < items.size(); ++i) index_.emplace(items[i].first, i);
  }
}

Value Value::WithText(Kind kind, std::string text) {
  Value value;
  value.kind_ = kind;
  value.data_ = std::make_shared<const std::string>(std::move(text));
  return value;
}

Value Value::Undefined(std::string hint) { return WithText(Kind::kUndefined, std::move(hint)); }
Value Value::String(std::string text) { return WithText(Kind::kString, std::move(text)); }
Value Value::Callable(std::string name) { return WithText(Kind::kCallable, std::move(name)); }

Value Value::None() {
  Value value;
  value.kind_ = Kind::kNone;
  return value;
}

Value Value::Bool(bool flag) {
  Value value;
  value.kind_ = Kind::kBool;
  value.data_ = static_cast<int64_t>(flag);
  return value;
}

Value Value::Int(int64_t number) {
  Value value;
  value.kind_ = Kind::kInt;
  value.data_ = number;
  return value;
}

Value Value::Float(double number) {
  Value value;
  value.kind_ = Kind::kFloat;
  value.data_ = number;
  return value;
}

Value Value::Macro(const MacroValue* macro) {
  Value value;
  value.kind_ = Kind::kMacro;
  value.data_ = macro;
  return value;
}

Value Value::Loop(const LoopState* loop) {
  Value value;
  value.kind_ = Kind::kLoop;
  value.data_ = loop;
  return value;
}

namespace {

int64_t TextCost(const std::string& text) { return static_cast<int64_t>(text.size() / kTextBytesPerStep); }

absl::Status NestedNamespace() {
  return absl::InvalidArgumentError("a namespace in an attribute of a namespace is not supported");
}

// Depth of a container that holds `item`.
absl::StatusOr<int> DepthAround(const Value& item, int depth) {
  if (item.kind() == Value::Kind::kMacro || item.kind() == Value::Kind::kLoop) {
    return InvalidArgument("a {} inside a list, dict or namespace is not supported", item.TypeName());
  }
  depth = std::max(depth, item.depth() + 1);
  if (depth > kValueDepthMax) return InvalidArgument("lists and dicts are nested more than {} deep", kValueDepthMax);
  return depth;
}

}  // namespace

absl::StatusOr<Value> Value::MakeSequence(Kind kind, List items) {
  Value value;
  value.kind_ = kind;
  value.depth_ = 1;
  for (const Value& item : items) {
    SPLICE_ASSIGN_OR_RETURN(value.depth_, DepthAround(item, value.depth_));
    value.cost_ = std::min(kCostMax, value.cost_ + 1 + item.cost());
    value.holds_namespace_ |= item.holds_namespace();
  }
  value.data_ = std::make_shared<List>(std::move(items));
  return value;
}

absl::StatusOr<Value> Value::MakeMapping(Kind kind, Dict items) {
  Value value;
  value.kind_ = kind;
  value.depth_ = 1;
  for (const auto& item : items.items) {
    SPLICE_ASSIGN_OR_RETURN(value.depth_, DepthAround(item.second, value.depth_));
    value.cost_ = std::min(kCostMax, value.cost_ + 1 + TextCost(item.first) + item.second.cost());
    value.holds_namespace_ |= item.second.holds_namespace();
  }
  if (kind == Kind::kNamespace) {
    if (value.holds_namespace_) return NestedNamespace();
    value.holds_namespace_ = true;
  }
  value.data_ = std::make_shared<Dict>(std::move(items));
  return value;
}

absl::StatusOr<Value> Value::MakeList(List items) { return MakeSequence(Kind::kList, std::move(items)); }
absl::StatusOr<Value> Value::MakeTuple(List items) { return MakeSequence(Kind::kTuple, std::move(items)); }
absl::StatusOr<Value> Value::MakeDict(Dict items) { return MakeMapping(Kind::kDict, std::move(items)); }
absl::StatusOr<Value> Value::MakeNamespace(Dict attributes) {
  return MakeMapping(Kind::kNamespace, std::move(attributes));
}

absl::Status Value::SetAttribute(std::string_view name, const Value& value) const {
  if (kind_ != Kind::kNamespace) return InvalidArgument("cannot assign attribute on non-namespace object");
  if (value.holds_namespace()) return NestedNamespace();
  SPLICE_RETURN_IF_ERROR(DepthAround(value, 0).status());
  std::get<std::shared_ptr<Dict>>(data_)->Set(name, value);
  return absl::OkStatus();
}

Value* Value::MutableAttribute(std::string_view name) const {
  return kind_ == Kind::kNamespace ? std::get<std::shared_ptr<Dict>>(data_)->Find(name) : nullptr;
}

absl::Status Value::Append(const Value& item) {
  if (kind_ != Kind::kList) return InvalidArgument("'{} object' has no method 'append'", TypeName());
  std::shared_ptr<List>& list = std::get<std::shared_ptr<List>>(data_);
  // A value that shares the list would see the item, but not what it costs.
  if (list.use_count() > 1) return absl::InvalidArgumentError("append to a list with a second name is not supported");
  if (list->size() >= kListItemsMax) return InvalidArgument("a list has more than {} items", kListItemsMax);
  SPLICE_ASSIGN_OR_RETURN(depth_, DepthAround(item, depth_));
  cost_ = std::min(kCostMax, cost_ + 1 + item.cost());
  holds_namespace_ |= item.holds_namespace();
  list->push_back(item);
  return absl::OkStatus();
}

// The list may cost less now; it counts as much as before.
absl::StatusOr<Value> Value::Pop(int64_t position) {
  if (kind_ != Kind::kList) return InvalidArgument("pop from '{} object' is not supported", TypeName());
  std::shared_ptr<List>& list = std::get<std::shared_ptr<List>>(data_);
  if (list.use_count() > 1) return absl::InvalidArgumentError("pop from a list with a second name is not supported");
  const auto size = static_cast<int64_t>(list->size());
  if (position < 0) position += size;
  if (position < 0 || position >= size) return absl::InvalidArgumentError("pop index out of range");
  Value item = std::move((*list)[position]);
  list->erase(list->begin() + position);
  return item;
}

int64_t Value::cost() const { return is_string() ? TextCost(AsString()) : cost_; }

int64_t Value::AsInt() const { return std::get<int64_t>(data_); }
double Value::AsNumber() const { return is_float() ? std::get<double>(data_) : static_cast<double>(AsInt()); }
const std::string& Value::AsString() const { return *std::get<std::shared_ptr<const std::string>>(data_); }
const List& Value::AsList() const { return *std::get<std::shared_ptr<List>>(data_); }
const Dict& Value::AsDict() const { return *std::get<std::shared_ptr<Dict>>(data_); }
const MacroValue& Value::AsMacro() const { return *std::get<const MacroValue*>(data_); }
const LoopState& Value::AsLoop() const { return *std::get<const LoopState*>(data_); }
const std::string& Value::callable_name() const { return AsString(); }

const std::string& Value::hint() const {
  static const std::string* const unnamed = new std::string("the value is undefined");
  const auto* text = std::get_if<std::shared_ptr<const std::string>>(&data_);
  return text != nullptr ? **text : *unnamed;
}

std::string_view Value::TypeName() const { return kTypeNames[static_cast<int>(kind_)]; }

bool Value::Truthy() const {
  switch (kind_) {
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
    case Kind::kInt:
      return AsInt() != 0;
    case Kind::kFloat:
      return AsNumber() != 0;
    case Kind::kString:
      return !AsString().empty();
    case Kind::kList:
    case Kind::kTuple:
      return !AsList().empty();
    case Kind::kDict:
      return !AsDict().items.empty();
    default:
      return true;
  }
}

bool Equal(const Value& a, const Value& b) {
  if (a.is_integer() && b.is_integer()) return a.AsInt() == b.AsInt();
  if (a.is_number() && b.is_number()) return a.AsNumber() == b.AsNumber();
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Value::Kind::kUndefined:
    case Value::Kind::kNone:
      return true;
    case Value::Kind::kString:
    case Value::Kind::kCallable:
      return a.AsString() == b.AsString();
    case Value::Kind::kList:
    case Value::Kind::kTuple:
      return std::equal(a.AsList().begin(), a.AsList().end(), b.AsList().begin(), b.AsList().end(), Equal);
    case Value::Kind::kDict: {
      if (a.AsDict().items.size() != b.AsDict().items.size()) return false;
      for (const auto& item : a.AsDict().items) {
        const Value* other = b.AsDict().Find(item.first);
        if (other == nullptr || !Equal(item.second, *other)) return false;
      }
      return true;
    }
    case Value::Kind::kNamespace:
      return &a.AsDict() == &b.AsDict();
    case Value::Kind::kMacro:
      return &a.AsMacro() == &b.AsMacro();
    default:
      return a.kind() == Value::Kind::kLoop && &a.AsLoop() == &b.AsLoop();
  }
}

absl::StatusOr<int> Compare(const Value& a, const Value& b) {
  const auto order = [](const auto& x, const auto& y) { return x < y ? -1 : y < x ? 1 : 0; };
  if (a.is_integer() && b.is_integer()) return order(a.AsInt(), b.AsInt());
  if (a.is_number() && b.is_number()) return order(a.AsNumber(), b.AsNumber());
  if (a.is_string() && b.is_string()) return order(a.AsString(), b.AsString());  // UTF-8 sorts like code points
  if (a.is_sequence() && a.kind() == b.kind()) {
    for (size_t i = 0; i < std::min(a.AsList().size(), b.AsList().size()); ++i) {
      if (!Equal(a.AsList()[i], b.AsList()[i])) return Compare(a.AsList()[i], b.AsList()[i]);
    }
    return order(a.AsList().size(), b.AsList().size());
  }
  for (const Value* value : {&a, &b}) {
    if (value->is_undefined()) return InvalidArgument("{}", value->hint());
  }
  return InvalidArgument("{} and {} have no order", a.TypeName(), b.TypeName());
}

absl::StatusOr<List> Iterate(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kUndefined:
      return List();
    case Value::Kind::kList:
    case Value::Kind::kTuple:
      return value.AsList();
    case Value::Kind::kDict: {
      List keys;
      for (const auto& item : value.AsDict().items) keys.push_back(Value::String(item.first));
      return keys;
    }
    case Value::Kind::kString: {
      List characters;
      const std::string& text = value.AsString();
      if (text.size() > kListItemsMax) {
        return InvalidArgument("a text of {} bytes is too long to visit its characters", text.size());
      }
      for (size_t pos = 0; pos < text.size();) {
        const size_t num_bytes = text::DecodeUtf8(text, pos).num_bytes;
        characters.push_back(Value::String(text.substr(pos, num_bytes)));
        pos += num_bytes;
      }
      return characters;
    }
    default:
      return InvalidArgument("'{}' object is not iterable", value.TypeName());
  }
}

}  // namespace spl::tokenizer::jinja
