#include "services/tokenizer/nfc.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <unordered_map>
#include <vector>

#include "services/tokenizer/utf8.h"

namespace spl::tokenizer {
namespace {

struct Decomposition {
  uint32_t code_point;
  uint32_t first;
  uint32_t second;  // 0: a singleton
  bool composes;    // NFC puts the pair together again
};

struct CodePointRange {
  uint32_t first;
  uint32_t last;
  int value;
};

#include "services/tokenizer/nfc_tables.inc"

// Hangul syllables are numbered by their leading consonant, vowel and trailing consonant (Unicode, section 3.12).
constexpr uint32_t kSyllableBase = 0xAC00, kLeadBase = 0x1100, kVowelBase = 0x1161, kTrailBase = 0x11A7;
constexpr uint32_t kNumLeads = 19, kNumVowels = 21, kNumTrails = 28;
constexpr uint32_t kNumSyllables = kNumLeads * kNumVowels * kNumTrails;

template <size_t n>
int ValueIn(const CodePointRange (&ranges)[n], uint32_t c) {
  const auto* it = std::upper_bound(std::begin(ranges), std::end(ranges), c,
                                    [](uint32_t value, const CodePointRange& range) { return value < range.first; });
  return it != std::begin(ranges) && c <= (it - 1)->last ? (it - 1)->value : 0;
}

int CombiningClass(uint32_t c) { return c < 0x300 ? 0 : ValueIn(kCombiningClasses, c); }

void Decompose(uint32_t c, std::vector<uint32_t>* out) {
  if (c >= kSyllableBase && c < kSyllableBase + kNumSyllables) {
    const uint32_t idx = c - kSyllableBase;
    out->push_back(kLeadBase + idx / (kNumVowels * kNumTrails));
    out->push_back(kVowelBase + idx / kNumTrails % kNumVowels);
    if (idx % kNumTrails != 0) out->push_back(kTrailBase + idx % kNumTrails);
    return;
  }
  const auto* it = std::lower_bound(std::begin(kDecompositions), std::end(kDecompositions), c,
                                    [](const Decomposition& d, uint32_t value) { return d.code_point < value; });
  if (it == std::end(kDecompositions) || it->code_point != c) {
    out->push_back(c);
    return;
  }
  Decompose(it->first, out);
  if (it->second != 0) Decompose(it->second, out);
}

// Runs of combining marks in the order of their classes; equal classes keep their order.
void Reorder(std::vector<uint32_t>* text) {
  for (size_t i = 0; i < text->size();) {
    size_t end = i;
    while (end < text->size() && CombiningClass((*text)[end]) != 0) ++end;
    std::stable_sort(text->begin() + i, text->begin() + end,
                     [](uint32_t a, uint32_t b) { return CombiningClass(a) < CombiningClass(b); });
    i = end + 1;
  }
}

using Compositions = std::unordered_map<uint64_t, uint32_t>;

const Compositions& AllCompositions() {
  static const Compositions* const compositions = [] {
    auto* map = new Compositions();
    for (const Decomposition& d : kDecompositions) {
      if (d.composes) map->emplace(static_cast<uint64_t>(d.first) << 32 | d.second, d.code_point);
    }
    return map;
  }();
  return *compositions;
}

// The composite of the two, or 0.
uint32_t Compose(uint32_t first, uint32_t second) {
  if (first - kLeadBase < kNumLeads && second - kVowelBase < kNumVowels) {
    return kSyllableBase + ((first - kLeadBase) * kNumVowels + second - kVowelBase) * kNumTrails;
  }
  const uint32_t syllable = first - kSyllableBase;
  if (syllable < kNumSyllables && syllable % kNumTrails == 0 && second - kTrailBase - 1 < kNumTrails - 1) {
    return first + second - kTrailBase;
  }
  const auto it = AllCompositions().find(static_cast<uint64_t>(first) << 32 | second);
  return it == AllCompositions().end() ? 0 : it->second;
}

std::vector<uint32_t> ComposeAll(const std::vector<uint32_t>& text) {
  std::vector<uint32_t> out;
  out.reserve(text.size());
  size_t starter = text.size();  // where in `out`; text.size(): none yet
  int last_class = 0;
  for (const uint32_t c : text) {
    const int combining_class = CombiningClass(c);
    const bool adjacent = starter < out.size() && starter + 1 == out.size();
    if (starter < out.size() && (adjacent || (last_class != 0 && last_class < combining_class))) {
      if (const uint32_t composite = Compose(out[starter], c)) {
        out[starter] = composite;
        continue;
      }
    }
    if (combining_class == 0) starter = out.size();
    last_class = combining_class;
    out.push_back(c);
  }
  return out;
}

}  // namespace

bool IsTriviallyNfc(std::string_view text) {
  for (size_t pos = 0; pos < text.size();) {
    if (static_cast<unsigned char>(text[pos]) < 0xCC) {  // below U+0300 nothing is active
      ++pos;
      continue;
    }
    const CodePoint c = DecodeUtf8(text, pos);
    if (ValueIn(kActive, c.value) != 0) return false;
    pos += c.num_bytes;
  }
  return true;
}

std::string ToNfc(std::string_view text) {
  if (IsTriviallyNfc(text)) return std::string(text);
  std::vector<uint32_t> decomposed;
  decomposed.reserve(text.size());
  for (size_t pos = 0; pos < text.size();) {
    const CodePoint c = DecodeUtf8(text, pos);
    Decompose(c.value, &decomposed);
    pos += c.num_bytes;
  }
  Reorder(&decomposed);
  std::string out;
  out.reserve(text.size());
  for (const uint32_t c : ComposeAll(decomposed)) AppendUtf8(c, &out);
  return out;
}

}  // namespace spl::tokenizer
