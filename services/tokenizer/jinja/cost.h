// Steps that an operation is charged before it runs, for the values that it reads. Without this charge, a small
// template could read the same large text or list millions of times, or walk a list whose items share their items,
// which doubles per level. Each function takes constant time and returns at most a few times kCostMax. The evaluator
// charges the result of an operation afterwards.
#pragma once

#include <cstdint>
#include <string_view>

#include "services/tokenizer/jinja/builtins.h"
#include "services/tokenizer/jinja/value.h"

namespace spl::tokenizer::jinja {

// Cost of printing or joining a value as text. A value that is a text itself is charged when it has been printed.
int64_t TextFormCost(const Value& value);

// Cost of Iterate(value): the items, or the characters.
int64_t IterationCost(const Value& value);

// Cost of `left op right`; op is == != < <= > >= in "not in".
int64_t ComparisonCost(std::string_view op, const Value& left, const Value& right);

int64_t ArgumentsCost(const Arguments& arguments);
int64_t FilterCost(std::string_view name, const Value& input, const Arguments& arguments);
int64_t TestCost(std::string_view name, const Value& input, const Arguments& arguments);
int64_t MethodCost(const Value& object, const Arguments& arguments);

}  // namespace spl::tokenizer::jinja
