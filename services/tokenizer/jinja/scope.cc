#include "services/tokenizer/jinja/scope.h"

#include "services/base/status.h"

namespace spl::tokenizer::jinja {

namespace {

// The variable, or the attribute of a namespace, that the expression names.
absl::StatusOr<Value*> VariableOf(const Expr& list, Scope* scope) {
  const bool is_attribute = list.kind == ExprKind::kAttribute && list.args[0]->kind == ExprKind::kName;
  if (list.kind != ExprKind::kName && !is_attribute)
    return absl::InvalidArgumentError("changing a list that is no variable is not supported");
  Value* target = scope->Find(is_attribute ? list.args[0]->text : list.text);
  if (target != nullptr && is_attribute) target = target->MutableAttribute(list.text);
  if (target == nullptr) return InvalidArgument("'{}' is no list that can be changed", list.text);
  return target;
}

}  // namespace

absl::StatusOr<Value> AppendToVariable(const Expr& list, const Arguments& arguments, Scope* scope) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("append", 1, {}));
  if (arguments.positional.empty()) return absl::InvalidArgumentError("append takes one argument");
  SPLICE_ASSIGN_OR_RETURN(Value* const target, VariableOf(list, scope));
  const Value& item = arguments.positional[0];
  if (list.kind == ExprKind::kAttribute && item.holds_namespace())
    return absl::InvalidArgumentError("a namespace in an attribute of a namespace is not supported");
  SPLICE_RETURN_IF_ERROR(target->Append(item));
  return Value::None();
}

absl::StatusOr<Value> PopFromVariable(const Expr& list, const Arguments& arguments, Scope* scope) {
  SPLICE_RETURN_IF_ERROR(arguments.Check("pop", 1, {}));
  SPLICE_ASSIGN_OR_RETURN(Value* const target, VariableOf(list, scope));
  const Value position = arguments.positional.empty() ? Value::Int(-1) : arguments.positional[0];
  if (!position.is_integer()) return InvalidArgument("pop takes an integer, not {}", position.TypeName());
  return target->Pop(position.AsInt());
}

}  // namespace spl::tokenizer::jinja
