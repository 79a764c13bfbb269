// What operations are charged before they run: the steps of what they read. Without this a small template reads the
// same large text or list millions of times, or walks a list whose items share their items, which doubles per level.
// Constant time each; at most a few times kCostMax. What an operation makes is charged after it, by the evaluator.
#pragma once

#include <cstdint>
#include <string_view>

#include "services/tokenizer/jinja/builtins.h"
#include "services/tokenizer/jinja/value.h"

namespace spl::tokenizer::jinja {

// Printing or joining to text; a text itself is charged when it has been printed.
int64_t TextFormCost(const Value& value);

// Iterate(value): the items, or the characters.
int64_t IterationCost(const Value& value);

// `left op right`, where op is == != < <= > >= in "not in".
int64_t ComparisonCost(std::string_view op, const Value& left, const Value& right);

int64_t ArgumentsCost(const Arguments& arguments);
int64_t FilterCost(std::string_view name, const Value& input, const Arguments& arguments);
int64_t TestCost(std::string_view name, const Value& input, const Arguments& arguments);
int64_t MethodCost(const Value& object, const Arguments& arguments);

}  // namespace spl::tokenizer::jinja
