// The parser's input: the current token, the next one, and errors that name the line.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "services/base/status.h"
#include "services/tokenizer/jinja/lexer.h"

namespace spl::tokenizer::jinja {

class TokenStream {
 public:
  explicit TokenStream(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  const Token& current() const { return tokens_[pos_]; }
  const Token& next() const { return tokens_[pos_ + 1 < tokens_.size() ? pos_ + 1 : pos_]; }
  void Skip() {
    if (pos_ + 1 < tokens_.size()) ++pos_;
  }

  bool Is(TokenKind kind) const { return current().kind == kind; }
  bool IsOperator(std::string_view text) const { return Is(TokenKind::kOperator) && current().text == text; }
  bool IsName(std::string_view text) const { return Is(TokenKind::kName) && current().text == text; }

  bool TakeOperator(std::string_view text) {
    const bool matches = IsOperator(text);
    if (matches) Skip();
    return matches;
  }
  bool TakeName(std::string_view text) {
    const bool matches = IsName(text);
    if (matches) Skip();
    return matches;
  }

  absl::Status Error(std::string_view what) const { return InvalidArgument("line {}: {}", current().line, what); }
  absl::Status Unexpected(std::string_view wanted) const {
    return InvalidArgument("line {}: expected {}, found {}", current().line, wanted, Describe());
  }
  absl::Status Expect(std::string_view op) {
    if (!TakeOperator(op)) return Unexpected("'" + std::string(op) + "'");
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> ExpectName() {
    if (!Is(TokenKind::kName)) return Unexpected("a name");
    std::string name = current().text;
    Skip();
    return name;
  }

 private:
  std::string Describe() const {
    switch (current().kind) {
      case TokenKind::kEnd:
        return "the end of the template";
      case TokenKind::kPrintEnd:
        return "'}}'";
      case TokenKind::kTagEnd:
        return "'%}'";
      case TokenKind::kString:
        return "a string";
      default:
        return "'" + current().text + "'";
    }
  }

  std::vector<Token> tokens_;
  size_t pos_ = 0;
};

}  // namespace spl::tokenizer::jinja
