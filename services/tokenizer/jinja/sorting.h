// The filters that compare things: "value | sort", "value | dictsort", "value | min", "value | max".
#pragma once

#include "services/tokenizer/jinja/builtins.h"

namespace spl::tokenizer::jinja {

// An item that a path like "a.b.0" leads to: attributes, keys and positions.
absl::StatusOr<Value> FollowPath(Value value, const Value& path);

// sort(reverse, case_sensitive, attribute): a new list. Equal items keep their order.
absl::StatusOr<Value> SortFilter(const Value& value, const Arguments& arguments);
// min and max(case_sensitive, attribute): the first such item; undefined for an empty sequence.
absl::StatusOr<Value> MinFilter(const Value& value, const Arguments& arguments);
absl::StatusOr<Value> MaxFilter(const Value& value, const Arguments& arguments);
// dictsort(case_sensitive, by, reverse): pairs of key and value.
absl::StatusOr<Value> DictSortFilter(const Value& value, const Arguments& arguments);

}  // namespace spl::tokenizer::jinja
