// The variables that a part of a template sees.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "services/tokenizer/jinja/ast.h"
#include "services/tokenizer/jinja/builtins.h"
#include "services/tokenizer/jinja/evaluator.h"

namespace spl::tokenizer::jinja {

// Names that one scope defines. Scopes are on the stack of the evaluation; outer ones outlive inner ones.
struct Scope {
  Scope* parent = nullptr;
  Variables variables;

  Value* Find(std::string_view name) {
    for (Scope* scope = this; scope != nullptr; scope = scope->parent) {
      for (auto it = scope->variables.rbegin(); it != scope->variables.rend(); ++it) {
        if (it->first == name) return &it->second;
      }
    }
    return nullptr;
  }
  void Set(std::string_view name, Value value) {
    for (auto& variable : variables) {
      if (variable.first == name) {
        variable.second = std::move(value);
        return;
      }
    }
    variables.emplace_back(std::string(name), std::move(value));
  }
};

// list.append(item), for a list that a variable or an attribute of a namespace holds. Returns None, as Python does.
// InvalidArgument: `list` is neither, or the list has another name, which would have to see the item, too.
absl::StatusOr<Value> AppendToVariable(const Expr& list, const Arguments& arguments, Scope* scope);

// list.pop(position), likewise; the last item without a position. InvalidArgument: there is no such item, too.
absl::StatusOr<Value> PopFromVariable(const Expr& list, const Arguments& arguments, Scope* scope);

}  // namespace spl::tokenizer::jinja
