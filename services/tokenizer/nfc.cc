#include "services/tokenizer/nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <vector>

#include "services/text/utf8.h"

namespace spl::tokenizer {
namespace {

int CombiningClass(utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; }

std::vector<utf8proc_int32_t> Decompose(std::string_view text) {
  constexpr auto kOptions = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE);
  std::vector<utf8proc_int32_t> out;
  out.reserve(text.size());
  std::array<utf8proc_int32_t, 8> parts;  // canonical decompositions have four at most
  int last_boundclass = 0;
  for (size_t pos = 0; pos < text.size();) {
    const text::CodePoint c = text::DecodeUtf8(text, pos);
    const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c.value), parts.data(), parts.size(),
                                               kOptions, &last_boundclass);
    out.insert(out.end(), parts.begin(), parts.begin() + count);
    pos += c.num_bytes;
  }
  return out;
}

// Sorts runs of combining marks by their classes; equal classes keep their order. utf8proc_map does the same in
// quadratic time, which a client's text could exploit.
void Reorder(std::vector<utf8proc_int32_t>* text) {
  for (auto begin = text->begin(); begin != text->end();) {
    const auto end = std::find_if(begin, text->end(), [](utf8proc_int32_t c) { return CombiningClass(c) == 0; });
    std::stable_sort(begin, end,
                     [](utf8proc_int32_t a, utf8proc_int32_t b) { return CombiningClass(a) < CombiningClass(b); });
    begin = end == text->end() ? end : end + 1;
  }
}

}  // namespace

std::string ToNfc(std::string_view text) {
  constexpr unsigned char kLeadOfU0300 = 0xCC;  // characters below it do not change or combine
  if (std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < kLeadOfU0300; }))
    return std::string(text);
  std::vector<utf8proc_int32_t> chars = Decompose(text);
  Reorder(&chars);
  const auto count = utf8proc_normalize_utf32(chars.data(), static_cast<utf8proc_ssize_t>(chars.size()),
                                              static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  chars.resize(count);
  std::string out;
  out.reserve(text.size());
  for (const utf8proc_int32_t c : chars) text::AppendUtf8(static_cast<char32_t>(c), &out);
  return out;
}

}  // namespace spl::tokenizer
