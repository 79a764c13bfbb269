// Arithmetic and slices of values, with Python's rules.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "services/tokenizer/jinja/value.h"

namespace spl::tokenizer::jinja {

// `op` is + - * / // % **. InvalidArgument: types that do not fit, division by zero, a result that is too large.
absl::StatusOr<Value> Calculate(std::string_view op, const Value& left, const Value& right);

absl::StatusOr<Value> Negate(const Value& value);

// object[start:stop:step]. InvalidArgument: not a list or string, parts that are no integers, a step of 0. A part that
// is none or undefined: left out.
absl::StatusOr<Value> Slice(const Value& object, const Value& start, const Value& stop, const Value& step);

}  // namespace spl::tokenizer::jinja
