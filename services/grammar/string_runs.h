// Keeps strings to their lengths: takes the tokens out of a mask that would make one too long, or end it too early.
//
// A grammar that counts the characters of a string has a state for each of them, and a mask over a large vocabulary for
// each state. Here the mask is that of a grammar without bounds, the same in all of a string, and a second matcher,
// which reads bytes and has no masks, knows the bounds. It is asked how many characters may follow; the tokens with
// more are taken out by their lengths.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "services/grammar/token_grammar.h"

namespace spl::grammar {

// A matcher, byte by byte.
class ByteMatcher {
 public:
  virtual ~ByteMatcher() = default;
  // False: the bytes do not fit, and nothing has changed.
  virtual bool Accept(std::string_view bytes) = 0;
  // Takes back the last accepted ones.
  virtual void Undo(int num_accepts) = 0;
};

// The tokens of a vocabulary as parts of JSON strings. Immutable; any thread.
class TokenRuns {
 public:
  explicit TokenRuns(const Vocabulary& vocabulary);

  // In front of the first quote or backslash of a token, or its end.
  struct Run {
    uint16_t characters = 0;  // that begin there; at most kLongest + 1
    char stop = 0;            // the quote or the backslash; 0: the token ends
  };
  static constexpr int kLongest = 256;

  // A token in which a string may begin.
  struct Opening {
    int32_t id = 0;
    uint16_t characters = 0;  // behind a quote, the most of them
    bool again = false;       // there is another quote, or a backslash, behind the first quote
  };

  const std::string& bytes(int32_t id) const { return tokens_[static_cast<size_t>(id)]; }
  int32_t size() const { return static_cast<int32_t>(tokens_.size()); }
  Run run(int32_t id) const { return runs_[static_cast<size_t>(id)]; }
  int longest() const { return longest_; }  // the longest of all runs, at most kLongest
  // Those with anything behind a quote, in the order of their bytes.
  std::span<const Opening> openings() const { return openings_; }
  // Those with a quote or a backslash, likewise.
  std::span<const int32_t> stops() const { return stops_; }
  // Those with a half of a surrogate pair in UTF-8, and those that would make one behind its first byte, 0xED.
  std::span<const int32_t> surrogates() const { return surrogates_; }
  std::span<const int32_t> behind_ed() const { return behind_ed_; }

 private:
  std::vector<std::string> tokens_;
  std::vector<Run> runs_;
  std::vector<Opening> openings_;
  std::vector<int32_t> stops_;
  std::vector<int32_t> surrogates_, behind_ed_;
  int longest_ = 0;
};

// Where an answer stands in UTF-8: the bytes of a character that is not complete.
class OpenCharacter {
 public:
  void Add(std::string_view bytes);
  // Bytes with which it is complete; empty: it is.
  std::string Completion() const;
  std::string_view bytes() const { return open_; }

 private:
  std::string open_;
};

// Takes out the tokens that make half of a surrogate pair in UTF-8: grammars have it as a character, and texts do not.
void ClearSurrogates(const TokenRuns& runs, const OpenCharacter& open, std::span<uint32_t> mask);

// Takes tokens out of `mask`, which is that of `wide`, a matcher of a grammar that UnboundedStrings describes; `exact`
// is one of the same grammar with the bounds. Afterwards `exact` accepts every token of the mask. Leaves both matchers
// as they were. Cost: some 100 us in a string of 128K tokens, and what `exact` takes for tokens in which a string
// begins; with `overlaps` also for those with quotes and backslashes and, outside of strings, for all others.
struct StringBounds {
  std::shared_ptr<const TokenRuns> runs;
  int64_t shortest = 0;   // UnboundedStrings
  bool overlaps = false;  // UnboundedStrings

  void Apply(ByteMatcher& wide, ByteMatcher& exact, const OpenCharacter& open, std::span<uint32_t> mask) const;

 private:
  void ApplyToOverlaps(ByteMatcher& wide, ByteMatcher& exact, const std::string& begin, bool inside,
                       std::span<uint32_t> mask) const;
};

}  // namespace spl::grammar
