#include "services/tokenizer/jinja/sorting.h"

#include <algorithm>
#include <charconv>
#include <numeric>

#include "services/base/status.h"
#include "services/tokenizer/jinja/text.h"

namespace spl::tokenizer::jinja {
namespace {

bool Flag(const Arguments& arguments, size_t idx, std::string_view name) {
  const Value* const value = arguments.Find(idx, name);
  return value != nullptr && value->Truthy();
}

// Texts are compared without case, unless the template asks for it.
absl::StatusOr<Value> KeyOf(const Value& value, bool case_sensitive) {
  if (case_sensitive || !value.is_string()) return value;
  SPLICE_ASSIGN_OR_RETURN(std::string lower, ChangeCase(value.AsString(), Case::kLower));
  return Value::String(std::move(lower));
}

// The keys of an item: one for each attribute of "a,b", or the item itself.
absl::StatusOr<List> KeysOf(const Value& item, const Value* attribute, bool case_sensitive) {
  List keys;
  if (attribute == nullptr || attribute->is_none()) {
    SPLICE_ASSIGN_OR_RETURN(Value key, KeyOf(item, case_sensitive));
    keys.push_back(std::move(key));
    return keys;
  }
  std::vector<std::string> paths = {""};
  if (attribute->is_string()) {
    const std::string comma = ",";
    SPLICE_ASSIGN_OR_RETURN(paths, Split(attribute->AsString(), &comma, -1));
  }
  for (const std::string& path : paths) {
    SPLICE_ASSIGN_OR_RETURN(const Value found,
                            FollowPath(item, attribute->is_string() ? Value::String(path) : *attribute));
    SPLICE_ASSIGN_OR_RETURN(Value key, KeyOf(found, case_sensitive));
    keys.push_back(std::move(key));
  }
  return keys;
}

// The order in which the keys ascend, or descend; equal ones keep theirs.
absl::StatusOr<std::vector<size_t>> OrderOf(const std::vector<List>& keys, bool reverse) {
  std::vector<size_t> order(keys.size());
  std::iota(order.begin(), order.end(), size_t{0});
  absl::Status failed;
  const auto before = [&](size_t a, size_t b) {
    for (size_t i = 0; i < keys[a].size(); ++i) {
      if (!failed.ok()) return false;
      const absl::StatusOr<int> compared = Compare(keys[a][i], keys[b][i]);
      if (!compared.ok()) failed = compared.status();
      if (!compared.ok()) return false;
      if (*compared != 0) return reverse ? *compared > 0 : *compared < 0;
    }
    return false;
  };
  std::stable_sort(order.begin(), order.end(), before);
  if (!failed.ok()) return failed;
  return order;
}

}  // namespace

absl::StatusOr<Value> FollowPath(Value value, const Value& path) {
  if (path.is_integer()) return GetItem(value, path);
  if (!path.is_string()) return InvalidArgument("an attribute must be a string, not {}", path.TypeName());
  const std::string dot = ".";
  SPLICE_ASSIGN_OR_RETURN(const std::vector<std::string> names, Split(path.AsString(), &dot, -1));
  for (const std::string& name : names) {
    int64_t idx = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), idx);
    const bool is_number = error == std::errc() && end == name.data() + name.size() && idx >= 0;
    SPLICE_ASSIGN_OR_RETURN(value, GetItem(value, is_number ? Value::Int(idx) : Value::String(name)));
  }
  return value;
}

absl::StatusOr<Value> SortFilter(const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("sort", 3, {"reverse", "case_sensitive", "attribute"}));
  SPLICE_ASSIGN_OR_RETURN(const List items, Iterate(value));
  std::vector<List> keys;
  for (const Value& item : items) {
    SPLICE_ASSIGN_OR_RETURN(List key,
                            KeysOf(item, arguments.Find(2, "attribute"), Flag(arguments, 1, "case_sensitive")));
    keys.push_back(std::move(key));
  }
  SPLICE_ASSIGN_OR_RETURN(const std::vector<size_t> order, OrderOf(keys, Flag(arguments, 0, "reverse")));
  List sorted;
  for (const size_t idx : order) sorted.push_back(items[idx]);
  return Value::MakeList(std::move(sorted));
}

namespace {

absl::StatusOr<Value> Extreme(const char* name, bool reverse, const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check(name, 2, {"case_sensitive", "attribute"}));
  SPLICE_ASSIGN_OR_RETURN(const List items, Iterate(value));
  if (items.empty()) return Value::Undefined("No aggregated item, sequence was empty.");
  std::vector<List> keys;
  for (const Value& item : items) {
    SPLICE_ASSIGN_OR_RETURN(List key,
                            KeysOf(item, arguments.Find(1, "attribute"), Flag(arguments, 0, "case_sensitive")));
    keys.push_back(std::move(key));
  }
  SPLICE_ASSIGN_OR_RETURN(const std::vector<size_t> order, OrderOf(keys, reverse));
  return items[order.front()];
}

}  // namespace

absl::StatusOr<Value> MinFilter(const Value& value, const Arguments& arguments) {
  return Extreme("min", false, value, arguments);
}
absl::StatusOr<Value> MaxFilter(const Value& value, const Arguments& arguments) {
  return Extreme("max", true, value, arguments);
}

absl::StatusOr<Value> DictSortFilter(const Value& value, const Arguments& arguments) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("dictsort", 3, {"case_sensitive", "by", "reverse"}));
  if (!value.is_dict()) return InvalidArgument("dictsort takes a dict, not {}", value.TypeName());
  const Value* const by = arguments.Find(1, "by");
  const bool by_value = by != nullptr && by->is_string() && by->AsString() == "value";
  if (by != nullptr && !by_value && !(by->is_string() && by->AsString() == "key"))
    return absl::InvalidArgumentError("You can only sort by either \"key\" or \"value\"");
  std::vector<List> keys;
  for (const auto& [name, item] : value.AsDict().items) {
    SPLICE_ASSIGN_OR_RETURN(Value key,
                            KeyOf(by_value ? item : Value::String(name), Flag(arguments, 0, "case_sensitive")));
    keys.push_back({std::move(key)});
  }
  SPLICE_ASSIGN_OR_RETURN(const std::vector<size_t> order, OrderOf(keys, Flag(arguments, 2, "reverse")));
  List pairs;
  for (const size_t idx : order) {
    const auto& [name, item] = value.AsDict().items[idx];
    SPLICE_ASSIGN_OR_RETURN(Value pair, Value::MakeTuple({Value::String(name), item}));
    pairs.push_back(std::move(pair));
  }
  return Value::MakeList(std::move(pairs));
}

}  // namespace spl::tokenizer::jinja
