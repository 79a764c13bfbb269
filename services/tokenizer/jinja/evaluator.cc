#include "services/tokenizer/jinja/evaluator.h"

#include <deque>

#include "services/base/status.h"
#include "services/tokenizer/jinja/builtins.h"
#include "services/tokenizer/jinja/cost.h"
#include "services/tokenizer/jinja/limits.h"
#include "services/tokenizer/jinja/loop_state.h"
#include "services/tokenizer/jinja/operators.h"
#include "services/tokenizer/jinja/scope.h"

namespace spl::tokenizer::jinja {

// A macro and its scope, which outlives it, because macros cannot be put where an outer scope sees them.
struct MacroValue {
  const Node* node = nullptr;
  Scope* scope = nullptr;
};

namespace {

using ValueOr = absl::StatusOr<Value>;

enum class Flow { kNext, kBreak, kContinue };

class Evaluator {
 public:
  absl::StatusOr<std::string> Run(const Block& block, Variables variables) {
    Scope globals{nullptr, std::move(variables)};
    Scope top{&globals, {}};
    SPLICE_RETURN_IF_ERROR(Execute(block, &top).status());
    return std::move(out_);
  }

 private:
  static absl::Status At(int line, const absl::Status& status) {
    return Annotate(status, "line " + std::to_string(line));
  }

  static int64_t TextSteps(size_t num_bytes) { return static_cast<int64_t>(num_bytes / kTextBytesPerStep); }

  absl::Status Charge(int line, int64_t more_steps = 0) {
    steps_ += 1 + more_steps;
    if (steps_ > kStepsMax) return InvalidArgument("line {}: the template runs too long", line);
    return absl::OkStatus();
  }

  absl::Status Print(int line, std::string_view text) {
    SPLICE_RETURN_IF_ERROR(Charge(line, TextSteps(text.size())));
    if (out_.size() + text.size() > kTextBytesMax) {
      return InvalidArgument("line {}: the template prints more than {} bytes", line, kTextBytesMax);
    }
    out_ += text;
    return absl::OkStatus();
  }

  absl::StatusOr<Flow> Execute(const Block& block, Scope* scope) {
    for (const Node& node : block) {
      if (++depth_ > kCallDepthMax) return InvalidArgument("line {}: the evaluation is nested too deep", node.line);
      SPLICE_ASSIGN_OR_RETURN(const Flow flow, ExecuteNode(node, scope));
      --depth_;
      if (flow != Flow::kNext) return flow;
    }
    return Flow::kNext;
  }

  absl::StatusOr<Flow> ExecuteNode(const Node& node, Scope* scope) {
    switch (node.kind) {
      case NodeKind::kData:
        SPLICE_RETURN_IF_ERROR(Print(node.line, node.text));
        return Flow::kNext;
      case NodeKind::kPrint:
        return ExecutePrint(node, scope);
      case NodeKind::kIf:
        return ExecuteIf(node, scope);
      case NodeKind::kFor:
        return ExecuteFor(node, scope);
      case NodeKind::kSet:
      case NodeKind::kSetBlock:
        SPLICE_RETURN_IF_ERROR(ExecuteSet(node, scope));
        return Flow::kNext;
      case NodeKind::kMacro:
        SPLICE_RETURN_IF_ERROR(Charge(node.line));
        scope->Set(node.text, Value::Macro(&macros_.emplace_back(MacroValue{&node, scope})));
        return Flow::kNext;
      case NodeKind::kBreak:
        return Flow::kBreak;
      case NodeKind::kContinue:
        return Flow::kContinue;
      case NodeKind::kScope: {
        Scope inner{scope, {}};
        SPLICE_RETURN_IF_ERROR(Execute(node.body, &inner).status());
        return Flow::kNext;
      }
    }
    return Flow::kNext;
  }

  absl::StatusOr<Flow> ExecutePrint(const Node& node, Scope* scope) {
    SPLICE_ASSIGN_OR_RETURN(const Value value, Evaluate(*node.expr, scope));
    SPLICE_RETURN_IF_ERROR(Charge(node.line, TextFormCost(value)));
    const absl::StatusOr<std::string> text = ToText(value);
    if (!text.ok()) return At(node.line, text.status());
    SPLICE_RETURN_IF_ERROR(Print(node.line, *text));
    return Flow::kNext;
  }

  absl::StatusOr<Flow> ExecuteIf(const Node& node, Scope* scope) {
    for (const auto& branch : node.branches) {
      SPLICE_ASSIGN_OR_RETURN(const Value condition, Evaluate(*branch.first, scope));
      if (condition.Truthy()) return Execute(branch.second, scope);
    }
    return Execute(node.else_body, scope);
  }

  // Assigns `value` to one target, or its items to several.
  absl::Status Assign(const Node& node, const Value& value, Scope* scope) {
    if (node.targets.size() == 1) return AssignOne(node, node.targets[0], value, scope);
    const absl::StatusOr<List> items = Iterate(value);
    if (!items.ok()) return At(node.line, items.status());
    if (items->size() != node.targets.size()) {
      return InvalidArgument("line {}: cannot unpack {} values into {} names", node.line, items->size(),
                             node.targets.size());
    }
    for (size_t i = 0; i < items->size(); ++i) {
      SPLICE_RETURN_IF_ERROR(AssignOne(node, node.targets[i], (*items)[i], scope));
    }
    return absl::OkStatus();
  }

  absl::Status AssignOne(const Node& node, const Target& target, const Value& value, Scope* scope) {
    if (target.attribute.empty()) {
      scope->Set(target.name, value);
      return absl::OkStatus();
    }
    const Value* object = scope->Find(target.name);
    if (object == nullptr) return InvalidArgument("line {}: '{}' is undefined", node.line, target.name);
    return At(node.line, object->SetAttribute(target.attribute, value));
  }

  absl::Status ExecuteSet(const Node& node, Scope* scope) {
    if (node.kind == NodeKind::kSet) {
      SPLICE_ASSIGN_OR_RETURN(const Value value, Evaluate(*node.expr, scope));
      return Assign(node, value, scope);
    }
    Scope inner{scope, {}};
    SPLICE_ASSIGN_OR_RETURN(std::string text, Capture(node.body, &inner));
    Scope with_body{scope, {{"", Value::String(std::move(text))}}};
    SPLICE_ASSIGN_OR_RETURN(const Value value, Evaluate(*node.expr, &with_body));
    return Assign(node, value, scope);
  }

  // Returns the text of `block` instead of printing it.
  absl::StatusOr<std::string> Capture(const Block& block, Scope* scope) {
    std::string outer = std::exchange(out_, std::string());
    SPLICE_RETURN_IF_ERROR(Execute(block, scope).status());
    return std::exchange(out_, std::move(outer));
  }

  absl::StatusOr<List> LoopItems(const Node& node, Scope* scope) {
    SPLICE_ASSIGN_OR_RETURN(const Value iterable, Evaluate(*node.expr, scope));
    SPLICE_RETURN_IF_ERROR(Charge(node.line, IterationCost(iterable)));
    absl::StatusOr<List> items = Iterate(iterable);
    if (!items.ok()) return At(node.line, items.status());
    if (node.condition == nullptr) return items;
    List kept;
    for (Value& item : *items) {
      Scope inner{scope, {}};
      SPLICE_RETURN_IF_ERROR(Assign(node, item, &inner));
      SPLICE_ASSIGN_OR_RETURN(const Value condition, Evaluate(*node.condition, &inner));
      if (condition.Truthy()) kept.push_back(std::move(item));
    }
    return kept;
  }

  absl::StatusOr<Flow> ExecuteFor(const Node& node, Scope* scope) {
    LoopState loop;
    SPLICE_ASSIGN_OR_RETURN(loop.items, LoopItems(node, scope));
    bool completed = false;  // some iteration reached its end; otherwise Jinja runs the else part
    for (; loop.idx < loop.items.size(); ++loop.idx) {
      SPLICE_RETURN_IF_ERROR(Charge(node.line));
      Scope inner{scope, {}};
      SPLICE_RETURN_IF_ERROR(Assign(node, loop.items[loop.idx], &inner));
      inner.Set("loop", Value::Loop(&loop));
      SPLICE_ASSIGN_OR_RETURN(const Flow flow, Execute(node.body, &inner));
      if (flow == Flow::kBreak) break;
      completed |= flow == Flow::kNext;
    }
    if (completed) return Flow::kNext;
    Scope inner{scope, {}};
    return Execute(node.else_body, &inner);
  }

  ValueOr Evaluate(const Expr& expr, Scope* scope) {
    if (++depth_ > kCallDepthMax) return InvalidArgument("line {}: the evaluation is nested too deep", expr.line);
    SPLICE_RETURN_IF_ERROR(Charge(expr.line));
    ValueOr value = EvaluateKind(expr, scope);
    --depth_;
    return value;
  }

  ValueOr EvaluateKind(const Expr& expr, Scope* scope) {
    switch (expr.kind) {
      case ExprKind::kConstant:
        return expr.value;
      case ExprKind::kName:
        return EvaluateName(expr, scope);
      case ExprKind::kList:
      case ExprKind::kTuple:
      case ExprKind::kDict:
        return EvaluateLiteral(expr, scope);
      case ExprKind::kCall:
        return EvaluateCall(expr, scope);
      case ExprKind::kAnd:
      case ExprKind::kOr:
        return EvaluateLogic(expr, scope);
      case ExprKind::kConditional:
        return EvaluateConditional(expr, scope);
      case ExprKind::kCompare:
        return EvaluateCompare(expr, scope);
      case ExprKind::kConcat:
        return EvaluateConcat(expr, scope);
      default:
        return EvaluateOperation(expr, scope);
    }
  }

  ValueOr EvaluateName(const Expr& expr, Scope* scope) {
    if (const Value* value = scope->Find(expr.text)) return *value;
    if (IsFunction(expr.text)) return Value::Callable(expr.text);
    return Value::Undefined("'" + expr.text + "' is undefined");
  }

  ValueOr EvaluateLiteral(const Expr& expr, Scope* scope) {
    List items;
    for (const ExprPtr& arg : expr.args) {
      SPLICE_ASSIGN_OR_RETURN(Value item, Evaluate(*arg, scope));
      items.push_back(std::move(item));
    }
    if (expr.kind != ExprKind::kDict) {
      ValueOr value =
          expr.kind == ExprKind::kList ? Value::MakeList(std::move(items)) : Value::MakeTuple(std::move(items));
      return value.ok() ? std::move(value) : At(expr.line, value.status());
    }
    Dict dict;
    for (size_t i = 0; i < items.size(); i += 2) {
      if (!items[i].is_string()) {
        return InvalidArgument("line {}: a {} as the key of a dict is not supported", expr.line, items[i].TypeName());
      }
      dict.Set(items[i].AsString(), items[i + 1]);
    }
    ValueOr value = Value::MakeDict(std::move(dict));
    return value.ok() ? std::move(value) : At(expr.line, value.status());
  }

  ValueOr EvaluateLogic(const Expr& expr, Scope* scope) {
    SPLICE_ASSIGN_OR_RETURN(Value left, Evaluate(*expr.args[0], scope));
    if (left.Truthy() == (expr.kind == ExprKind::kOr)) return left;
    return Evaluate(*expr.args[1], scope);
  }

  ValueOr EvaluateConditional(const Expr& expr, Scope* scope) {
    SPLICE_ASSIGN_OR_RETURN(const Value condition, Evaluate(*expr.args[1], scope));
    if (condition.Truthy()) return Evaluate(*expr.args[0], scope);
    if (expr.args[2] != nullptr) return Evaluate(*expr.args[2], scope);
    return Value::Undefined("the inline if-expression evaluated to false and no else section was defined");
  }

  static absl::StatusOr<bool> Holds(std::string_view op, const Value& left, const Value& right) {
    if (op == "==") return Equal(left, right);
    if (op == "!=") return !Equal(left, right);
    if (op == "in") return Contains(right, left);
    if (op == "not in") {
      SPLICE_ASSIGN_OR_RETURN(const bool contains, Contains(right, left));
      return !contains;
    }
    SPLICE_ASSIGN_OR_RETURN(const int order, Compare(left, right));
    if (op == "<") return order < 0;
    if (op == "<=") return order <= 0;
    return op == ">" ? order > 0 : order >= 0;
  }

  ValueOr EvaluateCompare(const Expr& expr, Scope* scope) {
    SPLICE_ASSIGN_OR_RETURN(Value left, Evaluate(*expr.args[0], scope));
    for (size_t i = 0; i < expr.operators.size(); ++i) {
      SPLICE_ASSIGN_OR_RETURN(Value right, Evaluate(*expr.args[i + 1], scope));
      SPLICE_RETURN_IF_ERROR(Charge(expr.line, ComparisonCost(expr.operators[i], left, right)));
      const absl::StatusOr<bool> holds = Holds(expr.operators[i], left, right);
      if (!holds.ok()) return At(expr.line, holds.status());
      if (!*holds) return Value::Bool(false);
      left = std::move(right);
    }
    return Value::Bool(true);
  }

  ValueOr EvaluateConcat(const Expr& expr, Scope* scope) {
    std::string joined;
    for (const ExprPtr& arg : expr.args) {
      SPLICE_ASSIGN_OR_RETURN(const Value value, Evaluate(*arg, scope));
      SPLICE_RETURN_IF_ERROR(Charge(expr.line, TextFormCost(value)));
      const absl::StatusOr<std::string> text = ToText(value);
      if (!text.ok()) return At(expr.line, text.status());
      if (joined.size() + text->size() > kTextBytesMax)
        return InvalidArgument("line {}: the result of ~ is too large", expr.line);
      joined += *text;
    }
    SPLICE_RETURN_IF_ERROR(Charge(expr.line, TextSteps(joined.size())));
    return Value::String(std::move(joined));
  }

  absl::StatusOr<Arguments> EvaluateArguments(const Expr& expr, size_t first, Scope* scope) {
    Arguments arguments;
    for (size_t i = first; i < expr.args.size(); ++i) {
      SPLICE_ASSIGN_OR_RETURN(Value value, Evaluate(*expr.args[i], scope));
      arguments.positional.push_back(std::move(value));
    }
    for (const auto& named : expr.named) {
      SPLICE_ASSIGN_OR_RETURN(Value value, Evaluate(*named.second, scope));
      arguments.named.emplace_back(named.first, std::move(value));
    }
    return arguments;
  }

  ValueOr EvaluateCall(const Expr& expr, Scope* scope) {
    SPLICE_ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(expr, 0, scope));
    const Value* callee = scope->Find(expr.text);
    if (callee != nullptr && callee->kind() == Value::Kind::kMacro)
      return CallMacro(expr, callee->AsMacro(), arguments);
    const bool is_function = callee == nullptr || callee->kind() == Value::Kind::kCallable;
    if (!is_function) return InvalidArgument("line {}: '{}' object is not callable", expr.line, callee->TypeName());
    const std::string& name = callee == nullptr ? expr.text : callee->callable_name();
    SPLICE_RETURN_IF_ERROR(Charge(expr.line, ArgumentsCost(arguments)));
    ValueOr value = CallFunction(name, arguments);
    if (name == "raise_exception") return value;  // the message is the template's, word for word
    return Made(expr, std::move(value));
  }

  ValueOr CallMacro(const Expr& call, const MacroValue& macro, const Arguments& arguments) {
    const Node& node = *macro.node;
    if (arguments.positional.size() > node.targets.size()) {
      return InvalidArgument("line {}: macro '{}' takes not more than {} argument(s)", call.line, node.text,
                             node.targets.size());
    }
    for (const auto& named : arguments.named) {
      bool known = false;
      for (const Target& parameter : node.targets) known |= parameter.name == named.first;
      if (!known)
        return InvalidArgument("line {}: macro '{}' takes no keyword argument '{}'", call.line, node.text, named.first);
    }
    Scope inner{macro.scope, {}};
    for (size_t i = 0; i < node.targets.size(); ++i) {
      const std::string& name = node.targets[i].name;
      Value value = Value::Undefined("parameter '" + name + "' was not provided");
      if (const Value* given = arguments.Find(i, name)) {
        value = *given;
      } else if (node.defaults[i] != nullptr) {
        SPLICE_ASSIGN_OR_RETURN(value, Evaluate(*node.defaults[i], &inner));
      }
      inner.Set(name, std::move(value));
    }
    SPLICE_ASSIGN_OR_RETURN(std::string text, Capture(node.body, &inner));
    return Value::String(std::move(text));
  }

  // Finishes an operation: charges the text or items of its result, adds the line to its error.
  ValueOr Made(const Expr& expr, ValueOr value) {
    if (!value.ok()) return At(expr.line, value.status());
    const int64_t steps = value->is_string()     ? TextSteps(value->AsString().size())
                          : value->is_sequence() ? static_cast<int64_t>(value->AsList().size())
                          : value->is_dict()     ? static_cast<int64_t>(value->AsDict().items.size())
                                                 : 0;
    SPLICE_RETURN_IF_ERROR(Charge(expr.line, steps));
    return value;
  }

  ValueOr EvaluatePart(const ExprPtr& part, Scope* scope) {
    return part == nullptr ? ValueOr(Value::None()) : Evaluate(*part, scope);
  }

  ValueOr EvaluateListChange(const Expr& expr, Scope* scope) {
    SPLICE_ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(expr, 1, scope));
    const bool appends = expr.text == "append";
    return Made(expr, appends ? AppendToVariable(*expr.args[0], arguments, scope)
                              : PopFromVariable(*expr.args[0], arguments, scope));
  }

  // Operations on a first operand: attributes, subscripts, filters, tests, methods, arithmetic.
  ValueOr EvaluateOperation(const Expr& expr, Scope* scope) {
    if (expr.kind == ExprKind::kMethod && (expr.text == "append" || expr.text == "pop"))
      return EvaluateListChange(expr, scope);
    SPLICE_ASSIGN_OR_RETURN(const Value operand, Evaluate(*expr.args[0], scope));
    switch (expr.kind) {
      case ExprKind::kAttribute: {
        ValueOr value = GetAttribute(operand, expr.text);
        return value.ok() ? std::move(value) : At(expr.line, value.status());
      }
      case ExprKind::kSubscript: {
        SPLICE_ASSIGN_OR_RETURN(const Value key, Evaluate(*expr.args[1], scope));
        if (operand.is_string()) SPLICE_RETURN_IF_ERROR(Charge(expr.line, operand.cost()));
        ValueOr value = GetItem(operand, key);
        return value.ok() ? std::move(value) : At(expr.line, value.status());
      }
      case ExprKind::kNot:
        return Value::Bool(!operand.Truthy());
      case ExprKind::kNegate:
        return Made(expr, Negate(operand));
      case ExprKind::kPlus:
        if (operand.is_number()) return operand.is_bool() ? Value::Int(operand.AsInt()) : operand;
        return InvalidArgument("line {}: bad operand type for unary +: '{}'", expr.line, operand.TypeName());
      default:
        return EvaluateWithArguments(expr, operand, scope);
    }
  }

  ValueOr EvaluateWithArguments(const Expr& expr, const Value& operand, Scope* scope) {
    if (expr.kind == ExprKind::kSlice) {
      SPLICE_ASSIGN_OR_RETURN(const Value start, EvaluatePart(expr.args[1], scope));
      SPLICE_ASSIGN_OR_RETURN(const Value stop, EvaluatePart(expr.args[2], scope));
      SPLICE_ASSIGN_OR_RETURN(const Value step, EvaluatePart(expr.args[3], scope));
      if (operand.is_string()) {
        SPLICE_RETURN_IF_ERROR(Charge(expr.line, step.is_none() ? operand.cost() : IterationCost(operand)));
      }
      return Made(expr, Slice(operand, start, stop, step));
    }
    SPLICE_ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(expr, 1, scope));
    if (expr.kind == ExprKind::kBinary) return Made(expr, Calculate(expr.text, operand, arguments.positional[0]));
    if (expr.kind == ExprKind::kFilter) {
      SPLICE_RETURN_IF_ERROR(Charge(expr.line, FilterCost(expr.text, operand, arguments)));
      return Made(expr, ApplyFilter(expr.text, operand, arguments));
    }
    if (expr.kind == ExprKind::kMethod) {
      SPLICE_RETURN_IF_ERROR(Charge(expr.line, MethodCost(operand, arguments)));
      return Made(expr, CallMethod(expr.text, operand, arguments));
    }
    SPLICE_RETURN_IF_ERROR(Charge(expr.line, TestCost(expr.text, operand, arguments)));
    const absl::StatusOr<bool> passes = ApplyTest(expr.text, operand, arguments);
    if (!passes.ok()) return At(expr.line, passes.status());
    return Value::Bool(*passes);
  }

  std::string out_;
  std::deque<MacroValue> macros_;
  int64_t steps_ = 0;
  int depth_ = 0;
};

}  // namespace

absl::StatusOr<std::string> Render(const Block& block, Variables variables) {
  return Evaluator().Run(block, std::move(variables));
}

}  // namespace spl::tokenizer::jinja
