#include "services/text/regex_dialect.h"

#include <cctype>

#include "absl/status/status.h"
#include "services/base/status.h"

namespace spl::text {
namespace {

// For use inside a set: White_Space, and its complement.
constexpr std::string_view kSpace =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";
constexpr std::string_view kNotSpace =
    "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}\\x{200b}-\\x{2027}"
    "\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}";
constexpr std::string_view kWord = "\\p{L}\\p{M}\\p{Nd}\\p{Pc}";
constexpr std::string_view kHex = "0-9A-Fa-f";

class Translator {
 public:
  explicit Translator(std::string_view pattern) : in_(pattern) {}

  absl::StatusOr<std::string> Run() {
    while (pos_ < in_.size()) SPLICE_RETURN_IF_ERROR(in_set_ ? SetItem() : Item());
    if (in_set_) return Unsupported("a set that is not closed");
    return std::move(out_);
  }

 private:
  absl::Status Unsupported(std::string_view construct) const {
    return InvalidArgument("{} at offset {} of the pattern \"{}\" is not supported", construct, pos_, in_);
  }
  bool Next(std::string_view text) const { return in_.substr(pos_, text.size()) == text; }
  void Copy(size_t n) {
    out_ += in_.substr(pos_, n);
    pos_ += n;
  }

  absl::Status Item() {
    switch (in_[pos_]) {
      case '\\':
        return Escape();
      case '[':
        return OpenSet();
      case '{':
        return Interval();
      case '(':
        return OpenGroup();
      default:
        Copy(1);
        return absl::OkStatus();
    }
  }

  absl::Status OpenSet() {
    in_set_ = true;
    Copy(Next("[^") ? 2 : 1);
    if (Next("]")) {  // a literal bracket when it comes first, in both dialects
      out_ += "\\]";
      ++pos_;
    }
    return absl::OkStatus();
  }

  absl::Status SetItem() {
    if (Next("]")) {
      in_set_ = false;
      Copy(1);
      return absl::OkStatus();
    }
    if (Next("&&")) return Unsupported("the set operation &&");
    if (Next("[:")) {
      const size_t end = in_.find(":]", pos_);
      if (end == std::string_view::npos) return Unsupported("a set inside a set");
      Copy(end + 2 - pos_);
      return absl::OkStatus();
    }
    if (Next("[")) return Unsupported("a set inside a set");
    if (Next("\\")) return Escape();
    Copy(1);
    return absl::OkStatus();
  }

  absl::Status Class(std::string_view inside, bool negated) {
    pos_ += 2;
    if (in_set_) {
      out_ += inside;
    } else {
      out_ += negated ? "[^" : "[";
      out_ += inside;
      out_ += ']';
    }
    return absl::OkStatus();
  }

  absl::Status WordBoundary(bool negated) {
    pos_ += 2;
    const std::string word = "[" + std::string(kWord) + "]";
    out_ += negated ? "(?:(?<=" + word + ")(?=" + word + ")|(?<!" + word + ")(?!" + word + "))"
                    : "(?:(?<=" + word + ")(?!" + word + ")|(?<!" + word + ")(?=" + word + "))";
    return absl::OkStatus();
  }

  absl::Status Escape() {
    if (pos_ + 1 >= in_.size()) return Unsupported("a backslash at the end");
    switch (in_[pos_ + 1]) {
      case 's':
        return Class(kSpace, false);
      case 'S':
        return in_set_ ? Class(kNotSpace, false) : Class(kSpace, true);
      case 'w':
        return Class(kWord, false);
      case 'W':
        return in_set_ ? Unsupported("\\W inside a set") : Class(kWord, true);
      case 'h':
        return Class(kHex, false);
      case 'H':
        return in_set_ ? Unsupported("\\H inside a set") : Class(kHex, true);
      case 'b':
      case 'B':
        if (!in_set_) return WordBoundary(in_[pos_ + 1] == 'B');
        Copy(2);
        return absl::OkStatus();
      case 'u':
        return CodePointEscape();
      case 'x':
        return HexEscape();
      default:
        Copy(2);
        return absl::OkStatus();
    }
  }

  absl::Status CodePointEscape() {
    const std::string_view digits = in_.substr(pos_ + 2, 4);
    if (digits.size() != 4) return Unsupported("\\u without four digits");
    for (const char c : digits) {
      if (!std::isxdigit(static_cast<unsigned char>(c))) return Unsupported("\\u without four digits");
    }
    out_ += "\\x{" + std::string(digits) + "}";
    pos_ += 6;
    return absl::OkStatus();
  }

  absl::Status HexEscape() {
    if (pos_ + 2 < in_.size() && in_[pos_ + 2] >= '8' && in_[pos_ + 2] != '{') {
      return Unsupported("a raw byte above \\x7F");
    }
    Copy(2);
    return absl::OkStatus();
  }

  // {n} {n,} {,n} {n,m}; anything else in braces is literal text in both dialects.
  absl::Status Interval() {
    size_t end = pos_ + 1;
    bool has_digit = false;
    int num_commas = 0;
    while (end < in_.size() && (std::isdigit(static_cast<unsigned char>(in_[end])) || in_[end] == ',')) {
      has_digit |= in_[end] != ',';
      num_commas += in_[end++] == ',';
    }
    if (end >= in_.size() || in_[end] != '}' || !has_digit || num_commas > 1) {
      Copy(1);
      return absl::OkStatus();
    }
    const bool no_minimum = in_[pos_ + 1] == ',';
    out_ += no_minimum ? "{0" : "{";
    ++pos_;
    Copy(end + 1 - pos_);
    if (Next("+")) return Unsupported("a possessive interval");
    if (Next("?") && num_commas == 0) return Unsupported("a lazy mark on a fixed interval");
    return absl::OkStatus();
  }

  absl::Status OpenGroup() {
    if (!Next("(?")) {
      Copy(1);
      return absl::OkStatus();
    }
    Copy(2);
    if (Next("<") || Next("#") || Next(">") || Next("=") || Next("!") || Next("~")) {
      if (Next("~")) return Unsupported("the absence operator (?~");
      if (Next("#")) {
        const size_t end = in_.find(')', pos_);
        if (end == std::string_view::npos) return Unsupported("a comment that is not closed");
        Copy(end - pos_);
      }
      return absl::OkStatus();
    }
    for (; pos_ < in_.size() && in_[pos_] != ':' && in_[pos_] != ')'; ++pos_) {
      const char flag = in_[pos_];
      if (flag != 'i' && flag != 'm' && flag != 'x' && flag != '-') return Unsupported("an inline flag");
      out_ += flag == 'm' ? 's' : flag;
    }
    return absl::OkStatus();
  }

  std::string_view in_;
  size_t pos_ = 0;
  bool in_set_ = false;
  std::string out_;
};

}  // namespace

absl::StatusOr<std::string> OnigurumaToPcre2(std::string_view pattern) { return Translator(pattern).Run(); }

}  // namespace spl::text
