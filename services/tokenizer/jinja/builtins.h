// Filters, tests, methods and global functions that templates may call by name. The parser refuses every other name.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "services/tokenizer/jinja/value.h"

namespace spl::tokenizer::jinja {

// The arguments of one call, without the value it is applied to.
struct Arguments {
  List positional;
  std::vector<std::pair<std::string, Value>> named;

  // The argument at `idx` or named `name`; null: not given.
  const Value* Find(size_t idx, std::string_view name) const;
  // InvalidArgument: more than `num_max` positional arguments, or a named one that is not in `names`.
  absl::Status Check(std::string_view callee, size_t num_max, const std::vector<std::string_view>& names) const;
};

bool IsFilter(std::string_view name);
bool IsTest(std::string_view name);
bool IsMethod(std::string_view name);
bool IsFunction(std::string_view name);

absl::StatusOr<Value> ApplyFilter(std::string_view name, const Value& input, const Arguments& arguments);
absl::StatusOr<bool> ApplyTest(std::string_view name, const Value& input, const Arguments& arguments);
absl::StatusOr<Value> CallMethod(std::string_view name, const Value& object, const Arguments& arguments);
absl::StatusOr<Value> CallFunction(std::string_view name, const Arguments& arguments);

// object.name and object[key]; an undefined value if there is none.
absl::StatusOr<Value> GetAttribute(const Value& object, std::string_view name);
absl::StatusOr<Value> GetItem(const Value& object, const Value& key);

// `needle in haystack`
absl::StatusOr<bool> Contains(const Value& haystack, const Value& needle);

}  // namespace spl::tokenizer::jinja
