#include "services/tokenizer/jinja/text.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>

#include "absl/container/flat_hash_set.h"
#include "services/base/status.h"
#include "services/text/regex.h"
#include "services/text/utf8.h"
#include "services/tokenizer/jinja/limits.h"

namespace spl::tokenizer::jinja {
namespace {

size_t PreviousCharacter(std::string_view text, size_t end) {
  size_t pos = end - 1;
  while (pos > 0 && (static_cast<unsigned char>(text[pos]) & 0xC0) == 0x80) --pos;
  return pos;
}

char Upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 32) : c; }
char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; }
bool IsAsciiLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// True if `text` has a character beyond ASCII for which upper or lower case may matter.
bool HasOtherCasedCharacters(std::string_view text) {
  if (std::none_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) >= 0x80; }))
    return false;
  static const text::Regex* const cased =
      new text::Regex(*text::Regex::Compile("[^\\x00-\\x7F](?<=[\\p{L&}\\p{Lm}\\p{Nl}\\x{345}Ⓐ-ⓩ])|[ªº]"));
  std::vector<text::Span> matches;
  return !cased->FindAll(text, &matches).ok() || !matches.empty();
}

}  // namespace

bool IsPythonSpace(char32_t value) { return text::IsWhitespace(value) || (value >= 0x1C && value <= 0x1F); }

int64_t LengthOf(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

size_t FindText(std::string_view text, std::string_view part, size_t from) {
  constexpr size_t kShort = 32;  // up to here find is linear even at worst, and usually faster
  if (part.size() <= kShort) return text.find(part, from);
  const void* const found = memmem(text.data() + from, text.size() - from, part.data(), part.size());
  if (found == nullptr) return std::string_view::npos;
  return static_cast<size_t>(static_cast<const char*>(found) - text.data());
}

std::string_view FirstCharacter(std::string_view text) { return text.substr(0, text::DecodeUtf8(text, 0).num_bytes); }
std::string_view LastCharacter(std::string_view text) { return text.substr(PreviousCharacter(text, text.size())); }

std::string Strip(std::string_view text, const std::string* characters, StripSide side) {
  absl::flat_hash_set<char32_t> stripped;
  for (size_t pos = 0; characters != nullptr && pos < characters->size();) {
    const text::CodePoint c = text::DecodeUtf8(*characters, pos);
    stripped.insert(c.value);
    pos += c.num_bytes;
  }
  const auto is_stripped = [&](std::string_view character) {
    const char32_t value = text::DecodeUtf8(character, 0).value;
    return characters == nullptr ? IsPythonSpace(value) : stripped.contains(value);
  };
  size_t begin = 0;
  size_t end = text.size();
  while (side != StripSide::kRight && begin < end) {
    const std::string_view character = text.substr(begin, text::DecodeUtf8(text, begin).num_bytes);
    if (!is_stripped(character)) break;
    begin += character.size();
  }
  while (side != StripSide::kLeft && end > begin) {
    const size_t pos = PreviousCharacter(text, end);
    if (!is_stripped(text.substr(pos, end - pos))) break;
    end = pos;
  }
  return std::string(text.substr(begin, end - begin));
}

namespace {

// Appends a part. InvalidArgument: the list is full.
absl::Status AddPart(std::string_view part, std::vector<std::string>* parts) {
  if (parts->size() >= kListItemsMax) return InvalidArgument("the text has more than {} parts", kListItemsMax);
  parts->emplace_back(part);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> SplitAtSpace(std::string_view text, int64_t max_splits) {
  std::vector<std::string> parts;
  size_t pos = 0;
  const auto skip = [&](bool space) {
    while (pos < text.size() && IsPythonSpace(text::DecodeUtf8(text, pos).value) == space) {
      pos += text::DecodeUtf8(text, pos).num_bytes;
    }
  };
  for (skip(true); pos < text.size(); skip(true)) {
    const size_t begin = pos;
    if (max_splits >= 0 && static_cast<int64_t>(parts.size()) == max_splits) {
      pos = text.size();
    } else {
      skip(false);
    }
    SPLICE_RETURN_IF_ERROR(AddPart(text.substr(begin, pos - begin), &parts));
  }
  return parts;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> Split(std::string_view text, const std::string* separator,
                                               int64_t max_splits) {
  if (separator == nullptr) return SplitAtSpace(text, max_splits);
  if (separator->empty()) return InvalidArgument("empty separator");
  std::vector<std::string> parts;
  size_t begin = 0;
  for (int64_t i = 0; max_splits < 0 || i < max_splits; ++i) {
    const size_t found = FindText(text, *separator, begin);
    if (found == std::string_view::npos) break;
    SPLICE_RETURN_IF_ERROR(AddPart(text.substr(begin, found - begin), &parts));
    begin = found + separator->size();
  }
  SPLICE_RETURN_IF_ERROR(AddPart(text.substr(begin), &parts));
  return parts;
}

absl::StatusOr<std::vector<std::string>> SplitFromRight(std::string_view text, const std::string* separator,
                                                        int64_t max_splits) {
  if (max_splits < 0) return Split(text, separator, max_splits);
  if (separator == nullptr) return InvalidArgument("rsplit with a limit needs a separator here");
  // Reverses the text, because only the search forwards is linear.
  const std::string separator_backwards(separator->rbegin(), separator->rend());
  SPLICE_ASSIGN_OR_RETURN(std::vector<std::string> parts,
                          Split(std::string(text.rbegin(), text.rend()), &separator_backwards, max_splits));
  for (std::string& part : parts) std::reverse(part.begin(), part.end());
  std::reverse(parts.begin(), parts.end());
  return parts;
}

absl::StatusOr<std::vector<std::string>> SplitLines(std::string_view text) {
  std::vector<std::string> lines;
  size_t begin = 0;
  for (size_t pos = 0; pos < text.size();) {
    const text::CodePoint c = text::DecodeUtf8(text, pos);
    const bool ends = (c.value >= 0x0A && c.value <= 0x0D) || (c.value >= 0x1C && c.value <= 0x1E) || c.value == 0x85 ||
                      c.value == 0x2028 || c.value == 0x2029;
    const size_t line_end = pos;
    pos += c.num_bytes;
    if (!ends) continue;
    if (c.value == '\r' && pos < text.size() && text[pos] == '\n') ++pos;
    SPLICE_RETURN_IF_ERROR(AddPart(text.substr(begin, line_end - begin), &lines));
    begin = pos;
  }
  if (begin < text.size()) SPLICE_RETURN_IF_ERROR(AddPart(text.substr(begin), &lines));
  return lines;
}

absl::StatusOr<std::string> Replace(std::string_view text, std::string_view from, std::string_view to,
                                    int64_t max_count) {
  if (from.empty()) return InvalidArgument("replacing an empty string is not supported");
  std::string out;
  size_t begin = 0;
  for (int64_t i = 0; max_count < 0 || i < max_count; ++i) {
    const size_t found = FindText(text, from, begin);
    if (found == std::string_view::npos) break;
    out += text.substr(begin, found - begin);
    out += to;
    begin = found + from.size();
  }
  out += text.substr(begin);
  return out;
}

absl::StatusOr<std::string> ChangeCase(std::string_view text, Case mode) {
  if (HasOtherCasedCharacters(text)) {
    return InvalidArgument("changing the case of \"{}\" is not supported: it has letters beyond ASCII",
                           text.substr(0, 200));
  }
  std::string out(text);
  bool word_starts = true;
  for (char& c : out) {
    const char original = c;
    switch (mode) {
      case Case::kUpper:
        c = Upper(c);
        break;
      case Case::kLower:
        c = Lower(c);
        break;
      case Case::kCapitalize:
        c = word_starts ? Upper(c) : Lower(c);
        word_starts = false;
        break;
      case Case::kTitle:
        c = word_starts ? Upper(c) : Lower(c);
        word_starts = !IsAsciiLetter(original);
        break;
      case Case::kJinjaTitle:
        c = word_starts ? Upper(c) : Lower(c);
        word_starts = std::string_view("-({[<").find(original) != std::string_view::npos ||
                      (static_cast<unsigned char>(original) < 0x80 && IsPythonSpace(original));
        break;
    }
  }
  return out;
}

std::string FloatText(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

namespace {

// Characters beyond ASCII that Python counts as unprintable.
std::vector<text::Span> UnprintableCharacters(std::string_view text) {
  std::vector<text::Span> found;
  if (std::none_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) >= 0x80; }))
    return found;
  static const text::Regex* const unprintable =
      new text::Regex(*text::Regex::Compile("[^\\x00-\\x7F](?<=[\\p{C}\\p{Z}])"));
  // One character at a time cannot exceed the match limit.
  if (!unprintable->FindAll(text, &found).ok()) found.clear();
  return found;
}

// A character beyond ASCII as repr writes it: itself, or an escape.
void AppendPrintable(char32_t value, std::string_view character, bool printable, std::string* out) {
  const auto number = static_cast<uint32_t>(value);
  if (printable) {
    *out += character;
  } else if (number < 0x100) {
    *out += fmt::format("\\x{:02x}", number);
  } else {
    *out += number < 0x10000 ? fmt::format("\\u{:04x}", number) : fmt::format("\\U{:08x}", number);
  }
}

}  // namespace

std::string QuotePython(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  const std::vector<text::Span> unprintable = UnprintableCharacters(text);
  auto next_unprintable = unprintable.begin();
  std::string out(1, quote);
  for (size_t pos = 0; pos < text.size(); ++pos) {
    const char c = text[pos];
    if (static_cast<unsigned char>(c) >= 0x80) {
      const text::CodePoint point = text::DecodeUtf8(text, pos);
      const bool printable = next_unprintable == unprintable.end() || next_unprintable->begin != pos;
      if (!printable) ++next_unprintable;
      AppendPrintable(point.value, text.substr(pos, point.num_bytes), printable, &out);
      pos += point.num_bytes - 1;
    } else if (c == quote || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  return out + quote;
}

std::string QuoteJson(std::string_view text, bool ensure_ascii) {
  std::string out = "\"";
  for (size_t pos = 0; pos < text.size();) {
    const text::CodePoint c = text::DecodeUtf8(text, pos);
    const std::string_view character = text.substr(pos, c.num_bytes);
    pos += c.num_bytes;
    if (c.value == '"' || c.value == '\\') {
      out += '\\';
      out += character;
    } else if (c.value == '\n') {
      out += "\\n";
    } else if (c.value == '\r') {
      out += "\\r";
    } else if (c.value == '\t') {
      out += "\\t";
    } else if (c.value == '\b') {
      out += "\\b";
    } else if (c.value == '\f') {
      out += "\\f";
    } else if (c.value < 0x20 || (ensure_ascii && c.value >= 0x7F && c.value < 0x10000)) {
      out += fmt::format("\\u{:04x}", static_cast<uint32_t>(c.value));
    } else if (ensure_ascii && c.value >= 0x10000) {
      const uint32_t rest = static_cast<uint32_t>(c.value) - 0x10000;
      out += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + (rest >> 10), 0xDC00 + (rest & 0x3FF));
    } else {
      out += character;
    }
  }
  return out + "\"";
}

}  // namespace spl::tokenizer::jinja
