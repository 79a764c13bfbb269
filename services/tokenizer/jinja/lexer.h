// Cuts template source into tokens, with the whitespace control of Hugging Face: trim_blocks and lstrip_blocks are on,
// and the last newline of the template is dropped.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace spl::tokenizer::jinja {

enum class TokenKind {
  kData,
  kPrintBegin,
  kPrintEnd,
  kTagBegin,
  kTagEnd,
  kName,
  kString,
  kInt,
  kFloat,
  kOperator,
  kEnd
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  std::string text;  // data, name, operator, or the value of a string
  int64_t int_value = 0;
  double float_value = 0;
  int line = 1;
};

// The last token is kEnd. InvalidArgument: "line N: …".
absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source);

}  // namespace spl::tokenizer::jinja
