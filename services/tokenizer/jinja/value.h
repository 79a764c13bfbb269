// Values of templates. As far as templates can tell, they behave like Python's.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

namespace spl::tokenizer::jinja {

class Value;
struct MacroValue;
struct LoopState;

using List = std::vector<Value>;

// Keeps the order of insertion. Keys are strings: JSON has no other keys, and template literals with others are
// refused. Find and Set take constant time. Only Set adds items.
struct Dict {
  std::vector<std::pair<std::string, Value>> items;

  const Value* Find(std::string_view key) const;
  Value* Find(std::string_view key);
  void Set(std::string_view key, Value value);

 private:
  size_t IndexOf(std::string_view key) const;  // items.size(): there is none

  absl::flat_hash_map<std::string, size_t> index_;  // holds all items, once there are many
};

inline constexpr int64_t kCostMax = 1 << 30;  // above kStepsMax; sums and products of a few costs do not overflow

// Deepest nesting of lists and dicts, so that walking one cannot exhaust the stack.
inline constexpr int kValueDepthMax = 100;

// Cheap to copy: strings and containers are shared. Only the attributes of a namespace change while others share it; a
// list changes (Append) only if no other value does. Macros and loops are borrowed from the evaluation that made them,
// and cannot be put into containers. A namespace may be in a container, but not below an attribute of a namespace: so
// nothing contains itself, and the depth stays bounded.
class Value {
 public:
  enum class Kind {
    kUndefined,
    kNone,
    kBool,
    kInt,
    kFloat,
    kString,
    kList,
    kTuple,
    kDict,
    kNamespace,
    kCallable,
    kMacro,
    kLoop
  };

  Value() = default;                         // undefined
  static Value Undefined(std::string hint);  // the hint names it: "'x' is undefined"
  static Value None();
  static Value Bool(bool value);
  static Value Int(int64_t value);
  static Value Float(double value);
  static Value String(std::string value);
  // InvalidArgument: nested too deep, or an item that cannot be in a container.
  static absl::StatusOr<Value> MakeList(List items);
  static absl::StatusOr<Value> MakeTuple(List items);
  static absl::StatusOr<Value> MakeDict(Dict items);
  static absl::StatusOr<Value> MakeNamespace(Dict attributes);
  static Value Callable(std::string name);  // a global function, or a method without its call
  static Value Macro(const MacroValue* macro);
  static Value Loop(const LoopState* loop);

  Kind kind() const { return kind_; }
  bool is_undefined() const { return kind_ == Kind::kUndefined; }
  bool is_none() const { return kind_ == Kind::kNone; }
  bool is_bool() const { return kind_ == Kind::kBool; }
  bool is_integer() const { return kind_ == Kind::kInt || kind_ == Kind::kBool; }  // as in Python
  bool is_float() const { return kind_ == Kind::kFloat; }
  bool is_number() const { return is_integer() || is_float(); }
  bool is_string() const { return kind_ == Kind::kString; }
  bool is_sequence() const { return kind_ == Kind::kList || kind_ == Kind::kTuple; }
  bool is_dict() const { return kind_ == Kind::kDict; }

  // REQUIRES: the kind fits.
  int64_t AsInt() const;    // integers and booleans
  double AsNumber() const;  // any number
  const std::string& AsString() const;
  const List& AsList() const;  // lists and tuples
  const Dict& AsDict() const;  // dicts and namespaces
  const MacroValue& AsMacro() const;
  const LoopState& AsLoop() const;
  const std::string& hint() const;  // hint of an undefined value
  const std::string& callable_name() const;

  // Sets an attribute of a namespace.
  absl::Status SetAttribute(std::string_view name, const Value& value) const;
  // The attribute of a namespace; null: there is none, or the value is no namespace.
  Value* MutableAttribute(std::string_view name) const;
  // Appends to a list. InvalidArgument: not a list, another value shares it, or it would be too long or too deep.
  absl::Status Append(const Value& item);
  // Takes an item out of a list; a negative position counts from the end. InvalidArgument: not a list, another value
  // shares it, or there is no such item.
  absl::StatusOr<Value> Pop(int64_t position);
  bool holds_namespace() const { return holds_namespace_; }  // is one, or has one inside

  bool Truthy() const;
  std::string_view TypeName() const;  // as in Python: "str", "NoneType", …
  int depth() const { return depth_; }
  // Steps of a walk over the whole value, at most kCostMax: its items, their contents, its text. A value that is in a
  // container twice counts twice, because a walk reaches it twice.
  int64_t cost() const;

 private:
  using Shared = std::variant<std::monostate, int64_t, double, std::shared_ptr<const std::string>,
                              std::shared_ptr<List>, std::shared_ptr<Dict>, const MacroValue*, const LoopState*>;
  static absl::StatusOr<Value> MakeSequence(Kind kind, List items);
  static absl::StatusOr<Value> MakeMapping(Kind kind, Dict items);
  static Value WithText(Kind kind, std::string text);

  Kind kind_ = Kind::kUndefined;
  bool holds_namespace_ = false;
  int depth_ = 0;     // containers only
  int64_t cost_ = 0;  // containers only
  Shared data_;
};

bool Equal(const Value& a, const Value& b);

// -1, 0 or 1. InvalidArgument: the two have no order.
absl::StatusOr<int> Compare(const Value& a, const Value& b);

// Lists the items, keys or characters that a loop over the value visits; none for undefined. InvalidArgument: not
// iterable, or a text with more than kListItemsMax bytes.
absl::StatusOr<List> Iterate(const Value& value);

// str(value). InvalidArgument: the value has no useful text (a function, a macro).
absl::StatusOr<std::string> ToText(const Value& value);

// repr(value), as it appears inside a printed list or dict.
absl::StatusOr<std::string> ToRepr(const Value& value);

struct JsonOptions {
  std::optional<int> indent;
  bool ensure_ascii = false;
  bool sort_keys = false;
};
// json.dumps(value). InvalidArgument: not JSON serializable.
absl::StatusOr<std::string> ToJson(const Value& value, const JsonOptions& options);

// Parses a JSON text; objects keep the order of their members.
absl::StatusOr<Value> FromJsonText(std::string_view json, const std::string& name);

}  // namespace spl::tokenizer::jinja
