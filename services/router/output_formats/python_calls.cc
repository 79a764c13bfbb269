#include "services/router/output_formats/python_calls.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace spl::router {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 64;

bool IsNamePart(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

bool IsNameStart(char c) { return IsNamePart(c) && std::isdigit(static_cast<unsigned char>(c)) == 0; }

void AppendUtf8(uint32_t c, std::string* out) {
  if (c < 0x80) {
    *out += static_cast<char>(c);
  } else if (c < 0x800) {
    *out += static_cast<char>(0xC0 | (c >> 6));
    *out += static_cast<char>(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    *out += static_cast<char>(0xE0 | (c >> 12));
    *out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
    *out += static_cast<char>(0x80 | (c & 0x3F));
  } else {
    *out += static_cast<char>(0xF0 | (c >> 18));
    *out += static_cast<char>(0x80 | ((c >> 12) & 0x3F));
    *out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
    *out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

std::string TextJson(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Goes through the text once. Every Read appends JSON to `out` and returns whether the text was what it should be.
class Reader {
 public:
  Reader(std::string_view text, bool json_texts) : text_(text), json_texts_(json_texts) {}

  // The next character, white space left aside, is taken if it is `c`.
  bool Take(char c) {
    SkipSpace();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  // A name; with `dots`, of an attribute, too.
  bool ReadName(bool dots, std::string* out) {
    SkipSpace();
    const size_t begin = at_;
    while (at_ < text_.size() && (IsNamePart(text_[at_]) || (dots && text_[at_] == '.'))) ++at_;
    *out = text_.substr(begin, at_ - begin);
    return !out->empty() && IsNameStart(out->front());
  }

  // The arguments of a call, behind its bracket, as an object.
  bool ReadArguments(std::string* out) {
    *out = "{";
    while (!Take(')')) {
      std::string name, value;
      if (!ReadName(false, &name) || !Take('=') || !ReadValue(0, &value)) return false;
      *out += (out->size() > 1 ? ", " : "") + TextJson(name) + ": " + value;
      if (!Take(',') && !Sees(')')) return false;
    }
    *out += "}";
    return true;
  }

  bool AtEnd() {
    SkipSpace();
    return at_ == text_.size();
  }

 private:
  void SkipSpace() { at_ = router::SkipSpace(text_, at_); }

  bool Sees(char c) {
    SkipSpace();
    return at_ < text_.size() && text_[at_] == c;
  }

  bool ReadValue(int depth, std::string* out) {
    SkipSpace();
    if (at_ == text_.size() || depth > kMaxDepth) return false;
    const char c = text_[at_];
    if (c == '"' || c == '\'') return ReadText(out);
    if (c == '[') return ReadList(']', depth, out);
    if (c == '(') return ReadList(')', depth, out);
    if (c == '{') return ReadDict(depth, out);
    const size_t begin = at_;
    while (at_ < text_.size() &&
           (IsNamePart(text_[at_]) || std::string_view("+-.").find(text_[at_]) != std::string_view::npos))
      ++at_;
    const std::string_view word = text_.substr(begin, at_ - begin);
    if (word == "True") return Append("true", out);
    if (word == "False") return Append("false", out);
    if (word == "None") return Append("null", out);
    return Json::accept(word.begin(), word.end()) && Append(word, out);
  }

  static bool Append(std::string_view json, std::string* out) {
    *out += json;
    return true;
  }

  bool ReadList(char end, int depth, std::string* out) {
    ++at_;
    *out += "[";
    for (bool first = true; !Take(end); first = false) {
      if (!first) *out += ", ";
      if (!ReadValue(depth + 1, out) || (!Take(',') && !Sees(end))) return false;
    }
    return Append("]", out);
  }

  bool ReadDict(int depth, std::string* out) {
    ++at_;
    *out += "{";
    for (bool first = true; !Take('}'); first = false) {
      if (!first) *out += ", ";
      if (!(Sees('"') || Sees('\'')) || !ReadText(out) || !Take(':')) return false;
      *out += ": ";
      if (!ReadValue(depth + 1, out) || (!Take(',') && !Sees('}'))) return false;
    }
    return Append("}", out);
  }

  bool ReadText(std::string* out) {
    if (json_texts_) return ReadJsonText(out);
    const char quote = text_[at_++];
    std::string text;
    for (; at_ < text_.size() && text_[at_] != quote; ++at_) {
      if (text_[at_] != '\\') {
        text += text_[at_];
      } else if (!ReadEscape(&text)) {
        return false;
      }
    }
    if (at_ == text_.size()) return false;
    ++at_;
    return Append(TextJson(text), out);
  }

  bool ReadJsonText(std::string* out) {
    const size_t begin = at_++;
    while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2 : 1;
    if (text_[begin] != '"' || at_ >= text_.size()) return false;
    ++at_;
    return Append(text_.substr(begin, at_ - begin), out);
  }

  // Leaves at_ at the escape's last byte. An escape that Python does not have stays as it is written.
  bool ReadEscape(std::string* text) {
    if (++at_ == text_.size()) return false;
    const char c = text_[at_];
    static constexpr std::string_view kNames = "ntrbfva0\\'\"", kBytes("\n\t\r\b\f\v\a\0\\'\"", 11);
    if (const size_t known = kNames.find(c); known != std::string_view::npos) {
      *text += kBytes[known];
      return true;
    }
    const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (digits == 0) {
      if (c != '\n') *text += {'\\', c};
      return true;
    }
    uint32_t code = 0;
    if (!ReadHex(digits, &code)) return false;
    if (code >= 0xD800 && code < 0xDC00 && text_.substr(at_ + 1, 2) == "\\u") {
      uint32_t low = 0;
      at_ += 2;
      if (!ReadHex(4, &low) || low < 0xDC00 || low >= 0xE000) return false;
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    if (code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return false;
    AppendUtf8(code, text);
    return true;
  }

  bool ReadHex(size_t num_digits, uint32_t* code) {
    *code = 0;
    for (size_t i = 0; i < num_digits; ++i) {
      if (++at_ >= text_.size() || std::isxdigit(static_cast<unsigned char>(text_[at_])) == 0) return false;
      const char c = static_cast<char>(std::tolower(static_cast<unsigned char>(text_[at_])));
      *code = *code * 16 + static_cast<uint32_t>(c <= '9' ? c - '0' : c - 'a' + 10);
    }
    return true;
  }

  const std::string_view text_;
  const bool json_texts_;
  size_t at_ = 0;
};

}  // namespace

std::optional<std::vector<ToolCallDelta>> ReadPythonCalls(std::string_view text, bool json_texts) {
  Reader reader(text, json_texts);
  std::vector<ToolCallDelta> calls;
  if (!reader.Take('[')) return std::nullopt;
  do {
    ToolCallDelta call;
    if (!reader.ReadName(true, &call.name) || !reader.Take('(') || !reader.ReadArguments(&call.arguments))
      return std::nullopt;
    calls.push_back(std::move(call));
  } while (reader.Take(','));
  if (!reader.Take(']') || !reader.AtEnd()) return std::nullopt;
  return calls;
}

bool MayBePythonCalls(std::string_view text, bool* certain) {
  *certain = false;
  size_t at = std::min(text.find_first_not_of(kWhiteSpace, 1), text.size());
  if (at == text.size()) return true;
  if (!IsNameStart(text[at])) return false;
  while (at < text.size() && (IsNamePart(text[at]) || text[at] == '.')) ++at;
  at = std::min(text.find_first_not_of(kWhiteSpace, at), text.size());
  *certain = at < text.size() && text[at] == '(';
  return at == text.size() || *certain;
}

}  // namespace spl::router
