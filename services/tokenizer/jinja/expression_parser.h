// The expression half of the parser. Precedence, from loosest: conditional, or, and, not, comparison, + -, ~, * / // %,
// **, unary, then attributes, calls, filters and tests.
#pragma once

#include "absl/status/statusor.h"
#include "services/tokenizer/jinja/ast.h"
#include "services/tokenizer/jinja/token_stream.h"

namespace spl::tokenizer::jinja {

class ExpressionParser {
 public:
  explicit ExpressionParser(TokenStream* stream) : stream_(*stream) {}

  absl::StatusOr<ExprPtr> Parse();                      // one expression
  absl::StatusOr<ExprPtr> ParseWithoutIf();             // ends in front of `if`
  absl::StatusOr<ExprPtr> ParseTuple(bool with_if);     // one expression, or a tuple of several separated by commas
  absl::StatusOr<ExprPtr> ParseFilters(ExprPtr input);  // zero or more "| name(…)"
  absl::StatusOr<ExprPtr> ParsePrimary();

  // Names that are called like functions. The caller checks that they can be defined.
  struct CalledName {
    std::string name;
    int line = 0;
  };
  const std::vector<CalledName>& called_names() const { return called_names_; }

 private:
  using ExprOr = absl::StatusOr<ExprPtr>;
  ExprOr ParseOr();
  ExprOr ParseAnd();
  ExprOr ParseNot();
  ExprOr ParseCompare();
  ExprOr ParseSum();
  ExprOr ParseConcat();
  ExprOr ParseProduct();
  ExprOr ParsePower();
  ExprOr ParseUnary(bool with_filters);
  ExprOr ParseConstant();
  ExprOr ParseParenthesis();
  ExprOr ParseListLiteral();
  ExprOr ParseDictLiteral();
  ExprOr ParsePostfix(ExprPtr object);
  ExprOr ParseSubscript(ExprPtr object);
  ExprOr ParseFiltersAndTests(ExprPtr input);
  ExprOr ParseFilter(ExprPtr input);
  ExprOr ParseTest(ExprPtr input);
  absl::Status ParseArguments(Expr* call);
  absl::Status CheckNamedByText(const Expr& filter) const;
  ExprOr Finish(ExprPtr expr) const;
  ExprPtr New(ExprKind kind) const;
  ExprPtr New(ExprKind kind, ExprPtr operand) const;

  TokenStream& stream_;
  std::vector<CalledName> called_names_;
  int nesting_ = 0;
};

}  // namespace spl::tokenizer::jinja
