#include "services/tokenizer/jinja/lexer.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "services/base/status.h"
#include "services/text/utf8.h"
#include "services/tokenizer/jinja/string_literal.h"
#include "services/tokenizer/jinja/text.h"

namespace spl::tokenizer::jinja {
namespace {

// \r\n and \r become \n; one newline at the very end is dropped.
std::string NormalizeNewlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
      continue;
    }
    out += '\n';
    if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

bool IsNameStart(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool IsDigit(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  explicit Lexer(std::string source) : in_(std::move(source)) {}

  absl::StatusOr<std::vector<Token>> Run() {
    while (pos_ < in_.size()) SPLICE_RETURN_IF_ERROR(Text());
    Push(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  absl::Status Error(std::string_view what) const { return InvalidArgument("line {}: {}", line_, what); }
  bool Next(std::string_view text) const { return std::string_view(in_).substr(pos_, text.size()) == text; }
  void Push(TokenKind kind, std::string text) {
    Token token;
    token.kind = kind;
    token.text = std::move(text);
    token.line = line_;
    tokens_.push_back(std::move(token));
  }
  void Advance(size_t num_bytes) {
    const auto begin = in_.begin() + pos_;
    line_ += static_cast<int>(std::count(begin, begin + num_bytes, '\n'));
    line_starting_ = num_bytes > 0 && in_[pos_ + num_bytes - 1] == '\n';
    pos_ += num_bytes;
  }
  size_t SpaceAt(size_t pos) const {  // bytes of whitespace from `pos` on
    size_t end = pos;
    while (end < in_.size()) {
      const text::CodePoint c = text::DecodeUtf8(in_, end);
      if (!IsPythonSpace(c.value)) break;
      end += c.num_bytes;
    }
    return end - pos;
  }

  // Data up to the next tag, then the tag.
  absl::Status Text() {
    size_t begin = pos_;
    for (;; ++begin) {
      begin = in_.find('{', begin);
      if (begin == std::string::npos) {
        Push(TokenKind::kData, in_.substr(pos_));
        Advance(in_.size() - pos_);
        return absl::OkStatus();
      }
      const char kind = begin + 1 < in_.size() ? in_[begin + 1] : '\0';
      if (kind == '{' || kind == '%' || kind == '#') break;
    }
    const char kind = in_[begin + 1];
    const char sign = begin + 2 < in_.size() ? in_[begin + 2] : '\0';
    PushData(begin, kind, sign);
    Advance(begin - pos_ + (sign == '-' || sign == '+' ? 3 : 2));
    if (kind == '#') return Comment();
    if (kind == '{') {
      Push(TokenKind::kPrintBegin, "");
      return Inside(TokenKind::kPrintEnd, "}}");
    }
    if (IsRaw()) return Raw();
    Push(TokenKind::kTagBegin, "");
    return Inside(TokenKind::kTagEnd, "%}");
  }

  void PushData(size_t end, char kind, char sign) {
    const std::string text = StripBefore(in_.substr(pos_, end - pos_), kind != '{', sign);
    if (!text.empty()) Push(TokenKind::kData, text);
  }

  // The part of `text` that stays in front of a tag.
  std::string StripBefore(const std::string& text, bool is_block, char sign) const {
    if (sign == '-') return Strip(text, nullptr, StripSide::kRight);
    if (sign == '+' || !is_block) return text;
    const size_t newline = text.rfind('\n');
    const size_t line = newline == std::string::npos ? 0 : newline + 1;
    if (line == 0 && !line_starting_) return text;
    return Strip(text.substr(line), nullptr, StripSide::kBoth).empty() ? text.substr(0, line) : text;
  }

  // Bytes of the end mark at pos_, with the whitespace that it removes; 0: there is none.
  size_t EndMark(std::string_view mark, bool trims_newline) const {
    if (in_[pos_] == '-' && std::string_view(in_).substr(pos_ + 1, 2) == mark) return 3 + SpaceAt(pos_ + 3);
    if (trims_newline && in_[pos_] == '+' && std::string_view(in_).substr(pos_ + 1, 2) == mark) return 3;
    if (!Next(mark)) return 0;
    return trims_newline && pos_ + 2 < in_.size() && in_[pos_ + 2] == '\n' ? 3 : 2;
  }

  absl::Status Comment() {
    const int line = line_;
    for (; pos_ < in_.size(); Advance(1)) {
      if (const size_t num_bytes = EndMark("#}", true)) {
        Advance(num_bytes);
        return absl::OkStatus();
      }
    }
    return InvalidArgument("line {}: the comment is not closed", line);
  }

  bool IsRaw() const {
    size_t pos = pos_ + SpaceAt(pos_);
    if (in_.compare(pos, 3, "raw") != 0) return false;
    pos += 3;
    pos += SpaceAt(pos);
    return in_.compare(pos, 2, "%}") == 0 || in_.compare(pos, 3, "-%}") == 0;
  }

  absl::Status Raw() {
    const int line = line_;
    const size_t close = in_.find("%}", pos_);
    Advance(close + 2 - pos_);
    if (in_[close - 1] == '-') Advance(SpaceAt(pos_));
    for (size_t begin = in_.find("{%", pos_); begin != std::string::npos; begin = in_.find("{%", begin + 2)) {
      size_t pos = begin + 2;
      const char sign = pos < in_.size() && (in_[pos] == '-' || in_[pos] == '+') ? in_[pos++] : '\0';
      pos += SpaceAt(pos);
      if (in_.compare(pos, 6, "endraw") != 0) continue;
      pos += 6;
      pos += SpaceAt(pos);
      const size_t before = pos_;
      pos_ = pos;
      const size_t num_bytes = pos < in_.size() ? EndMark("%}", true) : 0;
      pos_ = before;
      if (num_bytes == 0) continue;
      PushData(begin, '%', sign);
      Advance(pos + num_bytes - pos_);
      return absl::OkStatus();
    }
    return InvalidArgument("line {}: the raw block is not closed", line);
  }

  // Tokens up to the end mark.
  absl::Status Inside(TokenKind end_kind, std::string_view mark) {
    const int line = line_;
    std::string open;  // brackets that are not closed; inside them "}}" closes dicts
    while (pos_ < in_.size()) {
      if (open.empty()) {
        if (const size_t num_bytes = EndMark(mark, end_kind == TokenKind::kTagEnd)) {
          Push(end_kind, "");
          Advance(num_bytes);
          return absl::OkStatus();
        }
      }
      if (const size_t space = SpaceAt(pos_)) {
        Advance(space);
        continue;
      }
      SPLICE_RETURN_IF_ERROR(OneToken(&open));
    }
    return InvalidArgument("line {}: the tag is not closed with {}", line, mark);
  }

  absl::Status OneToken(std::string* open) {
    const char c = in_[pos_];
    if (IsNameStart(c)) return Name();
    if (IsDigit(c)) return Number();
    if (c == '\'' || c == '"') return StringToken();
    for (const std::string_view op : {"**", "//", "==", "!=", ">=", "<="}) {
      if (Next(op)) return Operator(op.size());
    }
    if (std::string_view("([{").find(c) != std::string_view::npos)
      open->push_back(c == '(' ? ')' : c == '[' ? ']' : '}');
    if (std::string_view(")]}").find(c) != std::string_view::npos) {
      if (open->empty() || open->back() != c) return Error(fmt::format("unexpected '{}'", c));
      open->pop_back();
    }
    if (std::string_view("+-*/%~[](){}><=.:|,;").find(c) == std::string_view::npos) {
      return Error(fmt::format("unexpected character '{}'", in_.substr(pos_, text::DecodeUtf8(in_, pos_).num_bytes)));
    }
    return Operator(1);
  }

  absl::Status Operator(size_t num_bytes) {
    Push(TokenKind::kOperator, in_.substr(pos_, num_bytes));
    Advance(num_bytes);
    return absl::OkStatus();
  }

  absl::Status Name() {
    size_t end = pos_;
    while (end < in_.size() && (IsNameStart(in_[end]) || IsDigit(in_[end]))) ++end;
    Push(TokenKind::kName, in_.substr(pos_, end - pos_));
    Advance(end - pos_);
    return absl::OkStatus();
  }

  absl::Status StringToken() {
    size_t end = pos_ + 1;
    while (end < in_.size() && in_[end] != in_[pos_]) end += in_[end] == '\\' ? 2 : 1;
    if (end >= in_.size()) return Error("the string is not closed");
    absl::StatusOr<std::string> value = UnescapeString(std::string_view(in_).substr(pos_ + 1, end - pos_ - 1));
    if (!value.ok()) return Error(MessageOf(value.status()));
    Push(TokenKind::kString, *std::move(value));
    Advance(end + 1 - pos_);
    return absl::OkStatus();
  }

  // Decimal integers and floats ("1", "1_000", "1.5", "1e3").
  absl::Status Number() {
    size_t end = pos_;
    std::string digits;
    bool is_float = false;
    const auto take_digits = [&] {
      while (end < in_.size() &&
             (IsDigit(in_[end]) || (in_[end] == '_' && end + 1 < in_.size() && IsDigit(in_[end + 1])))) {
        if (in_[end] != '_') digits += in_[end];
        ++end;
      }
    };
    take_digits();
    if (end + 1 < in_.size() && in_[end] == '.' && IsDigit(in_[end + 1])) {
      is_float = true;
      digits += in_[end++];
      take_digits();
    }
    const size_t sign = end + 1 < in_.size() && (in_[end + 1] == '-' || in_[end + 1] == '+') ? 1 : 0;
    if (end + 1 + sign < in_.size() && (in_[end] == 'e' || in_[end] == 'E') && IsDigit(in_[end + 1 + sign])) {
      is_float = true;
      digits += in_.substr(end, 1 + sign);
      end += 1 + sign;
      take_digits();
    }
    if (digits == "0" && end < in_.size() && std::string_view("xXoObB").find(in_[end]) != std::string_view::npos) {
      return Error("numbers other than decimal ones are not supported");
    }
    Push(is_float ? TokenKind::kFloat : TokenKind::kInt, digits);
    Token& token = tokens_.back();
    if (is_float) {
      token.float_value = std::strtod(digits.c_str(), nullptr);
    } else if (std::from_chars(digits.data(), digits.data() + digits.size(), token.int_value).ec != std::errc()) {
      return Error("the number " + digits + " is too large");
    } else if (digits.size() > 1 && digits[0] == '0' && token.int_value != 0) {
      return Error("the number " + digits + " starts with 0");
    }
    Advance(end - pos_);
    return absl::OkStatus();
  }

  std::string in_;
  size_t pos_ = 0;
  int line_ = 1;
  bool line_starting_ = true;  // the last consumed character ended a line
  std::vector<Token> tokens_;
};

}  // namespace

absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source) { return Lexer(NormalizeNewlines(source)).Run(); }

}  // namespace spl::tokenizer::jinja
