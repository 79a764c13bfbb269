#include "services/tokenizer/jinja/expression_parser.h"

#include <algorithm>
#include <utility>

#include "services/base/status.h"
#include "services/tokenizer/jinja/builtins.h"

namespace spl::tokenizer::jinja {
namespace {

// Bounds on the tree, so that parsing, evaluating or freeing it cannot exhaust the stack.
constexpr int kNestingMax = 40;
constexpr int kDepthMax = 200;

}  // namespace

ExprPtr ExpressionParser::New(ExprKind kind) const {
  auto expr = std::make_unique<Expr>();
  expr->kind = kind;
  expr->line = stream_.current().line;
  return expr;
}

ExprPtr ExpressionParser::New(ExprKind kind, ExprPtr operand) const {
  ExprPtr expr = New(kind);
  expr->args.push_back(std::move(operand));
  return expr;
}

absl::StatusOr<ExprPtr> ExpressionParser::Finish(ExprPtr expr) const {
  for (const ExprPtr& arg : expr->args) {
    if (arg != nullptr) expr->depth = std::max(expr->depth, arg->depth + 1);
  }
  for (const auto& named : expr->named) expr->depth = std::max(expr->depth, named.second->depth + 1);
  if (expr->depth > kDepthMax) return InvalidArgument("line {}: the expression is nested too deep", expr->line);
  return expr;
}

absl::StatusOr<ExprPtr> ExpressionParser::Parse() {
  if (nesting_ >= kNestingMax) return stream_.Error("the expression is nested too deep");
  ++nesting_;
  ExprOr result = ParseOr();
  while (result.ok() && stream_.TakeName("if")) {
    ExprPtr expr = New(ExprKind::kConditional, *std::move(result));
    SPLICE_ASSIGN_OR_RETURN(ExprPtr condition, ParseOr());
    expr->args.push_back(std::move(condition));
    expr->args.push_back(nullptr);
    if (stream_.TakeName("else")) {
      SPLICE_ASSIGN_OR_RETURN(expr->args[2], Parse());
    }
    result = Finish(std::move(expr));
  }
  --nesting_;
  return result;
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseWithoutIf() { return ParseOr(); }

absl::StatusOr<ExprPtr> ExpressionParser::ParseTuple(bool with_if) {
  SPLICE_ASSIGN_OR_RETURN(ExprPtr first, with_if ? Parse() : ParseWithoutIf());
  if (!stream_.IsOperator(",")) return first;
  ExprPtr tuple = New(ExprKind::kTuple, std::move(first));
  while (stream_.TakeOperator(",")) {
    if (stream_.Is(TokenKind::kPrintEnd) || stream_.Is(TokenKind::kTagEnd) || stream_.IsOperator(")")) break;
    SPLICE_ASSIGN_OR_RETURN(ExprPtr item, with_if ? Parse() : ParseWithoutIf());
    tuple->args.push_back(std::move(item));
  }
  return Finish(std::move(tuple));
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseOr() {
  SPLICE_ASSIGN_OR_RETURN(ExprPtr left, ParseAnd());
  while (stream_.TakeName("or")) {
    ExprPtr expr = New(ExprKind::kOr, std::move(left));
    SPLICE_ASSIGN_OR_RETURN(ExprPtr right, ParseAnd());
    expr->args.push_back(std::move(right));
    SPLICE_ASSIGN_OR_RETURN(left, Finish(std::move(expr)));
  }
  return left;
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseAnd() {
  SPLICE_ASSIGN_OR_RETURN(ExprPtr left, ParseNot());
  while (stream_.TakeName("and")) {
    ExprPtr expr = New(ExprKind::kAnd, std::move(left));
    SPLICE_ASSIGN_OR_RETURN(ExprPtr right, ParseNot());
    expr->args.push_back(std::move(right));
    SPLICE_ASSIGN_OR_RETURN(left, Finish(std::move(expr)));
  }
  return left;
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseNot() {
  int num_nots = 0;
  while (stream_.TakeName("not")) ++num_nots;
  SPLICE_ASSIGN_OR_RETURN(ExprPtr expr, ParseCompare());
  for (int i = 0; i < num_nots; ++i) {
    SPLICE_ASSIGN_OR_RETURN(expr, Finish(New(ExprKind::kNot, std::move(expr))));
  }
  return expr;
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseCompare() {
  SPLICE_ASSIGN_OR_RETURN(ExprPtr first, ParseSum());
  ExprPtr compare;
  for (;;) {
    std::string op;
    for (const std::string_view candidate : {"==", "!=", "<", "<=", ">", ">="}) {
      if (stream_.IsOperator(candidate)) op = candidate;
    }
    if (stream_.IsName("in")) op = "in";
    if (stream_.IsName("not") && stream_.next().kind == TokenKind::kName && stream_.next().text == "in") {
      op = "not in";
      stream_.Skip();
    }
    if (op.empty()) break;
    stream_.Skip();
    if (compare == nullptr) compare = New(ExprKind::kCompare, std::move(first));
    SPLICE_ASSIGN_OR_RETURN(ExprPtr right, ParseSum());
    compare->args.push_back(std::move(right));
    compare->operators.push_back(std::move(op));
  }
  return compare == nullptr ? ExprOr(std::move(first)) : Finish(std::move(compare));
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseSum() {
  SPLICE_ASSIGN_OR_RETURN(ExprPtr left, ParseConcat());
  while (stream_.IsOperator("+") || stream_.IsOperator("-")) {
    ExprPtr expr = New(ExprKind::kBinary, std::move(left));
    expr->text = stream_.current().text;
    stream_.Skip();
    SPLICE_ASSIGN_OR_RETURN(ExprPtr right, ParseConcat());
    expr->args.push_back(std::move(right));
    SPLICE_ASSIGN_OR_RETURN(left, Finish(std::move(expr)));
  }
  return left;
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseConcat() {
  SPLICE_ASSIGN_OR_RETURN(ExprPtr first, ParseProduct());
  if (!stream_.IsOperator("~")) return first;
  ExprPtr expr = New(ExprKind::kConcat, std::move(first));
  while (stream_.TakeOperator("~")) {
    SPLICE_ASSIGN_OR_RETURN(ExprPtr part, ParseProduct());
    expr->args.push_back(std::move(part));
  }
  return Finish(std::move(expr));
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseProduct() {
  SPLICE_ASSIGN_OR_RETURN(ExprPtr left, ParsePower());
  while (stream_.IsOperator("*") || stream_.IsOperator("/") || stream_.IsOperator("//") || stream_.IsOperator("%")) {
    ExprPtr expr = New(ExprKind::kBinary, std::move(left));
    expr->text = stream_.current().text;
    stream_.Skip();
    SPLICE_ASSIGN_OR_RETURN(ExprPtr right, ParsePower());
    expr->args.push_back(std::move(right));
    SPLICE_ASSIGN_OR_RETURN(left, Finish(std::move(expr)));
  }
  return left;
}

absl::StatusOr<ExprPtr> ExpressionParser::ParsePower() {
  SPLICE_ASSIGN_OR_RETURN(ExprPtr left, ParseUnary(true));
  while (stream_.TakeOperator("**")) {
    ExprPtr expr = New(ExprKind::kBinary, std::move(left));
    expr->text = "**";
    SPLICE_ASSIGN_OR_RETURN(ExprPtr right, ParseUnary(true));
    expr->args.push_back(std::move(right));
    SPLICE_ASSIGN_OR_RETURN(left, Finish(std::move(expr)));
  }
  return left;
}

// As in Jinja: -x|abs is (-x)|abs.
absl::StatusOr<ExprPtr> ExpressionParser::ParseUnary(bool with_filters) {
  ExprPtr expr;
  if (stream_.IsOperator("-") || stream_.IsOperator("+")) {
    const ExprKind kind = stream_.IsOperator("-") ? ExprKind::kNegate : ExprKind::kPlus;
    if (nesting_ >= kNestingMax) return stream_.Error("the expression is nested too deep");
    stream_.Skip();
    ++nesting_;
    SPLICE_ASSIGN_OR_RETURN(ExprPtr operand, ParseUnary(false));
    --nesting_;
    SPLICE_ASSIGN_OR_RETURN(expr, Finish(New(kind, std::move(operand))));
  } else {
    SPLICE_ASSIGN_OR_RETURN(expr, ParsePrimary());
  }
  SPLICE_ASSIGN_OR_RETURN(expr, ParsePostfix(std::move(expr)));
  return with_filters ? ParseFiltersAndTests(std::move(expr)) : ExprOr(std::move(expr));
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseConstant() {
  ExprPtr expr = New(ExprKind::kConstant);
  const Token& token = stream_.current();
  if (token.kind == TokenKind::kInt) expr->value = Value::Int(token.int_value);
  if (token.kind == TokenKind::kFloat) expr->value = Value::Float(token.float_value);
  if (token.kind == TokenKind::kString) {
    std::string text = token.text;  // adjacent strings are joined
    for (; stream_.next().kind == TokenKind::kString; stream_.Skip()) text += stream_.next().text;
    expr->value = Value::String(std::move(text));
  }
  stream_.Skip();
  return expr;
}

absl::StatusOr<ExprPtr> ExpressionParser::ParsePrimary() {
  if (stream_.Is(TokenKind::kInt) || stream_.Is(TokenKind::kFloat) || stream_.Is(TokenKind::kString)) {
    return ParseConstant();
  }
  if (stream_.Is(TokenKind::kName)) {
    const std::string name = stream_.current().text;
    ExprPtr expr = New(ExprKind::kConstant);
    stream_.Skip();
    if (name == "true" || name == "True" || name == "false" || name == "False") {
      expr->value = Value::Bool(name == "true" || name == "True");
    } else if (name == "none" || name == "None") {
      expr->value = Value::None();
    } else if (name == "varargs" || name == "kwargs" || name == "caller") {
      return stream_.Error("'" + name + "' is not supported");
    } else {
      expr->kind = ExprKind::kName;
      expr->text = name;
    }
    return expr;
  }
  if (stream_.TakeOperator("(")) return ParseParenthesis();
  if (stream_.TakeOperator("[")) return ParseListLiteral();
  if (stream_.TakeOperator("{")) return ParseDictLiteral();
  return stream_.Unexpected("an expression");
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseParenthesis() {
  if (stream_.TakeOperator(")")) return New(ExprKind::kTuple);
  SPLICE_ASSIGN_OR_RETURN(ExprPtr expr, ParseTuple(true));
  SPLICE_RETURN_IF_ERROR(stream_.Expect(")"));
  return expr;
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseListLiteral() {
  ExprPtr list = New(ExprKind::kList);
  while (!stream_.TakeOperator("]")) {
    if (!list->args.empty()) SPLICE_RETURN_IF_ERROR(stream_.Expect(","));
    if (stream_.TakeOperator("]")) break;
    SPLICE_ASSIGN_OR_RETURN(ExprPtr item, Parse());
    list->args.push_back(std::move(item));
  }
  return Finish(std::move(list));
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseDictLiteral() {
  ExprPtr dict = New(ExprKind::kDict);
  while (!stream_.TakeOperator("}")) {
    if (!dict->args.empty()) SPLICE_RETURN_IF_ERROR(stream_.Expect(","));
    if (stream_.TakeOperator("}")) break;
    SPLICE_ASSIGN_OR_RETURN(ExprPtr key, Parse());
    SPLICE_RETURN_IF_ERROR(stream_.Expect(":"));
    SPLICE_ASSIGN_OR_RETURN(ExprPtr value, Parse());
    dict->args.push_back(std::move(key));
    dict->args.push_back(std::move(value));
  }
  return Finish(std::move(dict));
}

absl::StatusOr<ExprPtr> ExpressionParser::ParsePostfix(ExprPtr object) {
  for (;;) {
    if (stream_.TakeOperator(".")) {
      if (stream_.Is(TokenKind::kInt)) {  // x.0 is x[0]
        ExprPtr item = New(ExprKind::kSubscript, std::move(object));
        SPLICE_ASSIGN_OR_RETURN(ExprPtr idx, ParseConstant());
        item->args.push_back(std::move(idx));
        SPLICE_ASSIGN_OR_RETURN(object, Finish(std::move(item)));
        continue;
      }
      ExprPtr attribute = New(ExprKind::kAttribute, std::move(object));
      SPLICE_ASSIGN_OR_RETURN(attribute->text, stream_.ExpectName());
      if (stream_.IsOperator("(")) {
        attribute->kind = ExprKind::kMethod;
        if (!IsMethod(attribute->text)) return stream_.Error("the method '" + attribute->text + "' is not supported");
        stream_.Skip();
        SPLICE_RETURN_IF_ERROR(ParseArguments(attribute.get()));
      }
      SPLICE_ASSIGN_OR_RETURN(object, Finish(std::move(attribute)));
    } else if (stream_.TakeOperator("[")) {
      SPLICE_ASSIGN_OR_RETURN(object, ParseSubscript(std::move(object)));
    } else if (stream_.IsOperator("(")) {
      if (object->kind != ExprKind::kName) return stream_.Error("calling this expression is not supported");
      object->kind = ExprKind::kCall;
      called_names_.push_back({object->text, object->line});
      stream_.Skip();
      SPLICE_RETURN_IF_ERROR(ParseArguments(object.get()));
      SPLICE_ASSIGN_OR_RETURN(object, Finish(std::move(object)));
    } else {
      return object;
    }
  }
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseSubscript(ExprPtr object) {
  ExprPtr expr = New(ExprKind::kSubscript, std::move(object));
  ExprPtr parts[3];
  int num_colons = 0;
  while (!stream_.IsOperator("]")) {
    if (stream_.TakeOperator(":")) {
      if (++num_colons > 2) return stream_.Error("a slice has at most two colons");
      continue;
    }
    if (parts[num_colons] != nullptr) return stream_.Unexpected("']'");
    SPLICE_ASSIGN_OR_RETURN(parts[num_colons], Parse());
  }
  stream_.Skip();
  if (num_colons == 0) {
    if (parts[0] == nullptr) return stream_.Error("the subscript is empty");
    expr->args.push_back(std::move(parts[0]));
    return Finish(std::move(expr));
  }
  expr->kind = ExprKind::kSlice;
  for (ExprPtr& part : parts) expr->args.push_back(std::move(part));
  return Finish(std::move(expr));
}

// Parses from behind "(" up to and including ")".
absl::Status ExpressionParser::ParseArguments(Expr* call) {
  bool first = true;
  while (!stream_.TakeOperator(")")) {
    if (!first) SPLICE_RETURN_IF_ERROR(stream_.Expect(","));
    first = false;
    if (stream_.TakeOperator(")")) break;
    if (stream_.IsOperator("*") || stream_.IsOperator("**"))
      return stream_.Error("argument unpacking is not supported");
    const bool is_named =
        stream_.Is(TokenKind::kName) && stream_.next().kind == TokenKind::kOperator && stream_.next().text == "=";
    if (is_named) {
      std::string name = stream_.current().text;
      stream_.Skip();
      stream_.Skip();
      SPLICE_ASSIGN_OR_RETURN(ExprPtr value, Parse());
      call->named.emplace_back(std::move(name), std::move(value));
      continue;
    }
    if (!call->named.empty()) return stream_.Error("a positional argument after a named one");
    SPLICE_ASSIGN_OR_RETURN(ExprPtr value, Parse());
    call->args.push_back(std::move(value));
  }
  return absl::OkStatus();
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseFiltersAndTests(ExprPtr input) {
  for (;;) {
    if (stream_.IsOperator("|")) {
      SPLICE_ASSIGN_OR_RETURN(input, ParseFilter(std::move(input)));
    } else if (stream_.IsName("is")) {
      SPLICE_ASSIGN_OR_RETURN(input, ParseTest(std::move(input)));
    } else {
      return input;
    }
  }
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseFilters(ExprPtr input) {
  while (stream_.IsOperator("|")) {
    SPLICE_ASSIGN_OR_RETURN(input, ParseFilter(std::move(input)));
  }
  return input;
}

// map("upper"), select("string"), selectattr("role", "equalto", …): filters and tests that are named by a string.
absl::Status ExpressionParser::CheckNamedByText(const Expr& filter) const {
  const bool by_attribute = filter.text == "selectattr" || filter.text == "rejectattr";
  const size_t idx = by_attribute ? 2 : 1;
  if (filter.args.size() <= idx || !filter.args[idx]->value.is_string()) return absl::OkStatus();
  const std::string& name = filter.args[idx]->value.AsString();
  if (filter.text == "map" && !IsFilter(name)) return stream_.Error("the filter '" + name + "' is not supported");
  const bool selects = by_attribute || filter.text == "select" || filter.text == "reject";
  if (selects && !IsTest(name)) return stream_.Error("the test '" + name + "' is not supported");
  return absl::OkStatus();
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseFilter(ExprPtr input) {
  stream_.Skip();
  ExprPtr filter = New(ExprKind::kFilter, std::move(input));
  SPLICE_ASSIGN_OR_RETURN(filter->text, stream_.ExpectName());
  if (!IsFilter(filter->text)) return stream_.Error("the filter '" + filter->text + "' is not supported");
  if (stream_.TakeOperator("(")) SPLICE_RETURN_IF_ERROR(ParseArguments(filter.get()));
  SPLICE_RETURN_IF_ERROR(CheckNamedByText(*filter));
  return Finish(std::move(filter));
}

absl::StatusOr<ExprPtr> ExpressionParser::ParseTest(ExprPtr input) {
  stream_.Skip();
  const bool negated = stream_.TakeName("not");
  ExprPtr test = New(ExprKind::kTest, std::move(input));
  SPLICE_ASSIGN_OR_RETURN(test->text, stream_.ExpectName());
  if (!IsTest(test->text)) return stream_.Error("the test '" + test->text + "' is not supported");
  if (stream_.TakeOperator("(")) {
    SPLICE_RETURN_IF_ERROR(ParseArguments(test.get()));
  } else {
    const bool is_keyword = stream_.IsName("else") || stream_.IsName("or") || stream_.IsName("and");
    const bool is_operand = stream_.Is(TokenKind::kName) || stream_.Is(TokenKind::kString) ||
                            stream_.Is(TokenKind::kInt) || stream_.Is(TokenKind::kFloat) || stream_.IsOperator("[") ||
                            stream_.IsOperator("{");
    if (stream_.IsName("is")) return stream_.Error("tests cannot be chained with is");
    if (is_operand && !is_keyword && !stream_.IsName("if") && !stream_.IsName("in") && !stream_.IsName("not")) {
      SPLICE_ASSIGN_OR_RETURN(ExprPtr operand, ParsePrimary());
      SPLICE_ASSIGN_OR_RETURN(operand, ParsePostfix(std::move(operand)));
      test->args.push_back(std::move(operand));
    }
  }
  ExprOr result = Finish(std::move(test));
  if (!result.ok() || !negated) return result;
  return Finish(New(ExprKind::kNot, *std::move(result)));
}

}  // namespace spl::tokenizer::jinja
