#include "services/grammar/string_runs.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <utility>

namespace spl::grammar {
namespace {

// A character that may stand in any string and that no schema names: U+0080.
constexpr std::string_view kAnyCharacter = "\xc2\x80";

// Tokens without quotes and backslashes of which numbers, literals and white space have fewer.
constexpr size_t kMostTried = 4096;

bool BeginsCharacter(char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }

// Whether `behind` goes on with a half of a surrogate pair that begins with 0xED.
bool MakesSurrogate(std::string_view begin, std::string_view behind) {
  return begin == "\xed" && !behind.empty() && static_cast<unsigned char>(behind.front()) >= 0xA0 &&
         !BeginsCharacter(behind.front());
}

uint16_t CountCharacters(std::string_view bytes) {
  const auto count = std::count_if(bytes.begin(), bytes.end(), BeginsCharacter);
  return static_cast<uint16_t>(std::min<std::ptrdiff_t>(count, TokenRuns::kLongest + 1));
}

bool Fits(ByteMatcher& matcher, std::string_view bytes) {
  if (!matcher.Accept(bytes)) return false;
  matcher.Undo(1);
  return true;
}

// Room that is left in a string.
struct Room {
  int most = TokenRuns::kLongest + 1;  // characters; more than kLongest: any number
  int least = 0;                       // characters in front of the end
  bool escapes = true;                 // a backslash may come
};

// Asks both matchers. REQUIRES: they are in a string, behind `begin`.
Room RoomOf(ByteMatcher& wide, ByteMatcher& exact, const std::string& begin, int longest) {
  Room room;
  room.escapes = Fits(exact, begin + "\\") || !Fits(wide, begin + "\\");
  const bool may_end = Fits(exact, begin + "\"") || !Fits(wide, begin + "\"");
  bool found = may_end;
  int accepted = begin.empty() || exact.Accept(begin) ? 0 : -1;
  const int before = accepted == 0 && !begin.empty() ? 1 : 0;
  while (accepted >= 0 && accepted < longest && exact.Accept(kAnyCharacter)) {
    ++accepted;
    if (found || !Fits(exact, "\"")) continue;
    room.least = accepted;
    found = true;
  }
  exact.Undo(std::max(accepted, 0) + before);
  if (!found) room.least = longest + 1;
  std::string more = begin;
  for (int i = 0; i <= std::max(accepted, 0); ++i) more += kAnyCharacter;
  if (accepted < longest && Fits(wide, more)) room.most = std::max(accepted, 0);
  return room;
}

void Clear(std::span<uint32_t> mask, int32_t id) { mask[static_cast<size_t>(id) / 32] &= ~(1u << (id % 32)); }

// Takes out the tokens that have too much, or end too early.
void KeepToRoom(const TokenRuns& runs, const Room& room, std::span<uint32_t> mask) {
  if (room.most > runs.longest() && room.least == 0 && room.escapes) return;
  for (size_t word = 0; word < mask.size(); ++word) {
    for (uint32_t bits = mask[word]; bits != 0; bits &= bits - 1) {
      const auto id = static_cast<int32_t>(word * 32) + __builtin_ctz(bits);
      if (id >= runs.size()) break;
      const TokenRuns::Run run = runs.run(id);
      if (run.characters > room.most || (run.stop == '\\' && !room.escapes) ||
          (run.stop == '"' && run.characters < room.least))
        Clear(mask, id);
    }
  }
}

bool Has(std::span<const uint32_t> mask, int32_t id) {
  return (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
}

// Goes through texts in their order, so that what they begin with in common is read once.
class InOrder {
 public:
  explicit InOrder(ByteMatcher& matcher) : matcher_(matcher) {}
  ~InOrder() { matcher_.Undo(static_cast<int>(read_.size())); }

  bool Fits(std::string_view text) {
    const size_t common = std::mismatch(text.begin(), text.end(), read_.begin(), read_.end()).first - text.begin();
    // The byte behind what was read did not fit.
    if (common == read_.size() && refused_.size() > common && text.substr(0, refused_.size()) == refused_) return false;
    matcher_.Undo(static_cast<int>(read_.size() - common));
    read_.resize(common);
    for (const char c : text.substr(common)) {
      if (!matcher_.Accept(std::string_view(&c, 1))) {
        refused_ = read_ + c;
        return false;
      }
      read_ += c;
    }
    return true;
  }

 private:
  ByteMatcher& matcher_;
  std::string read_, refused_;
};

// Tokens of the mask without quotes and backslashes; empty also where there are more than `most`.
std::vector<int32_t> PlainTokens(const TokenRuns& runs, std::span<const uint32_t> mask, size_t most) {
  std::vector<int32_t> plain;
  for (size_t word = 0; word < mask.size(); ++word) {
    for (uint32_t bits = mask[word]; bits != 0; bits &= bits - 1) {
      const auto id = static_cast<int32_t>(word * 32) + __builtin_ctz(bits);
      if (id >= runs.size() || runs.bytes(id).empty() || runs.run(id).stop != 0) continue;
      plain.push_back(id);
      if (plain.size() > most) return {};
    }
  }
  return plain;
}

// Takes those of `ids`, in the order of their bytes, out of the mask that do not fit.
void KeepFitting(const TokenRuns& runs, std::span<const int32_t> ids, ByteMatcher& matcher, std::span<uint32_t> mask) {
  InOrder check(matcher);
  for (const int32_t id : ids) {
    if (Has(mask, id) && !check.Fits(runs.bytes(id))) Clear(mask, id);
  }
}

// The same for tokens with a quote or a backslash, where `matcher` takes any character: how many stand in front of the
// first of these counts, and not which.
void KeepFittingEnds(const TokenRuns& runs, ByteMatcher& matcher, const std::string& begin, std::span<uint32_t> mask) {
  std::map<std::pair<int, std::string_view>, bool> known;
  for (const int32_t id : runs.stops()) {
    if (!Has(mask, id)) continue;
    const TokenRuns::Run run = runs.run(id);
    const std::string_view bytes = runs.bytes(id), end = bytes.substr(bytes.find(run.stop));
    const auto [found, is_new] = known.try_emplace({run.characters, end}, false);
    if (is_new) {
      std::string text = begin;
      for (int i = 0; i < run.characters; ++i) text += kAnyCharacter;
      found->second = Fits(matcher, text.append(end));
    }
    if (!found->second) Clear(mask, id);
  }
}

// Takes the tokens out of the mask, and of `ids`, whose first byte does not fit.
void KeepFirstBytes(const TokenRuns& runs, ByteMatcher& matcher, std::span<uint32_t> mask, std::vector<int32_t>* ids) {
  std::array<std::optional<bool>, 256> fits;
  std::erase_if(*ids, [&](int32_t id) {
    const char byte = runs.bytes(id).front();
    std::optional<bool>& known = fits[static_cast<unsigned char>(byte)];
    if (!known.has_value()) known = Fits(matcher, std::string_view(&byte, 1));
    if (!*known) Clear(mask, id);
    return !*known;
  });
}

}  // namespace

TokenRuns::TokenRuns(const Vocabulary& vocabulary) : tokens_(vocabulary.tokens), runs_(tokens_.size()) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    const std::string_view token = tokens_[i];
    const auto id = static_cast<int32_t>(i);
    if (MakesSurrogate("\xed", token)) behind_ed_.push_back(id);
    for (size_t at = token.find('\xed'); at != std::string_view::npos; at = token.find('\xed', at + 1)) {
      if (MakesSurrogate(token.substr(at, 1), token.substr(at + 1))) surrogates_.push_back(id);
    }
    const size_t stop = std::min(token.find_first_of("\"\\"), token.size());
    runs_[i] = {CountCharacters(token.substr(0, stop)), stop < token.size() ? token[stop] : '\0'};
    if (runs_[i].stop != 0) stops_.push_back(id);
    longest_ = std::max(longest_, std::min<int>(runs_[i].characters, kLongest));
    const size_t quote = token.find('"');
    if (quote == std::string_view::npos || quote + 1 == token.size()) continue;
    Opening opening{.id = id};
    opening.again = token.find_first_of("\"\\", quote + 1) != std::string_view::npos;
    for (size_t from = quote + 1; from <= token.size();) {
      const size_t end = std::min(token.find_first_of("\"\\", from), token.size());
      opening.characters = std::max(opening.characters, CountCharacters(token.substr(from, end - from)));
      from = end + 1;
    }
    openings_.push_back(opening);
  }
  std::sort(stops_.begin(), stops_.end(), [&](int32_t a, int32_t b) { return bytes(a) < bytes(b); });
  std::sort(openings_.begin(), openings_.end(),
            [&](const Opening& a, const Opening& b) { return bytes(a.id) < bytes(b.id); });
}

void OpenCharacter::Add(std::string_view bytes) {
  for (const char c : bytes) {
    if (BeginsCharacter(c)) open_.clear();
    open_ += c;
    const auto first = static_cast<unsigned char>(open_.front());
    const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC0 ? 2 : 1;
    if (open_.size() >= length) open_.clear();
  }
}

std::string OpenCharacter::Completion() const {
  if (open_.empty()) return "";
  const auto first = static_cast<unsigned char>(open_.front());
  std::string rest(static_cast<size_t>(first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2) - open_.size(), '\x80');
  if (open_.size() > 1) return rest;
  if (first == 0xE0) rest.front() = '\xA0';
  if (first == 0xF0) rest.front() = '\x90';
  return rest;
}

void ClearSurrogates(const TokenRuns& runs, const OpenCharacter& open, std::span<uint32_t> mask) {
  for (const int32_t id : runs.surrogates()) Clear(mask, id);
  if (open.bytes() != "\xed") return;
  for (const int32_t id : runs.behind_ed()) Clear(mask, id);
}

void StringBounds::Apply(ByteMatcher& wide, ByteMatcher& exact, const OpenCharacter& open,
                         std::span<uint32_t> mask) const {
  const std::string begin = open.Completion();
  const bool inside = Fits(wide, begin + std::string(kAnyCharacter));
  // Behind a quote a string of JSON goes on nowhere: this is text in front of a schema, the same in both grammars.
  if (inside && Fits(wide, begin + '"' + std::string(kAnyCharacter))) return;
  if (overlaps) return ApplyToOverlaps(wide, exact, begin, inside, mask);
  if (inside) KeepToRoom(*runs, RoomOf(wide, exact, begin, runs->longest()), mask);
  InOrder check(exact);
  for (const TokenRuns::Opening& opening : runs->openings()) {
    if (!Has(mask, opening.id)) continue;
    // In a string the first quote ends it, and elsewhere it begins one.
    if (!opening.again && (inside || opening.characters <= shortest)) continue;
    if (!check.Fits(runs->bytes(opening.id))) Clear(mask, opening.id);
  }
}

// Plain tokens, those without quotes and backslashes, are told by their lengths in a string while `exact` takes any
// character there. Where it takes none, certain characters are asked for, and most tokens end at their first byte.
// Outside of strings only a pattern has so many plain tokens that they are not tried: both grammars have the same ones
// there (string_overlaps.h).
void StringBounds::ApplyToOverlaps(ByteMatcher& wide, ByteMatcher& exact, const std::string& begin, bool inside,
                                   std::span<uint32_t> mask) const {
  if (inside) {
    const Room room = RoomOf(wide, exact, begin, runs->longest());
    if (room.most > 0) {
      KeepToRoom(*runs, room, mask);
      return KeepFittingEnds(*runs, exact, begin, mask);
    }
  }
  std::vector<int32_t> plain = PlainTokens(*runs, mask, inside ? mask.size() * 32 : kMostTried);
  KeepFitting(*runs, runs->stops(), exact, mask);
  KeepFirstBytes(*runs, exact, mask, &plain);
  std::sort(plain.begin(), plain.end(), [&](int32_t a, int32_t b) { return runs->bytes(a) < runs->bytes(b); });
  KeepFitting(*runs, plain, exact, mask);
}

}  // namespace spl::grammar
