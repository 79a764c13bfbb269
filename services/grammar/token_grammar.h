// Structured output: which tokens may come next, so that an answer matches a JSON schema, a regular expression or a
// grammar. Interfaces only; libsplice_xgrammar.so implements them (grammar_plugin.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl::grammar {

enum class GrammarKind : uint8_t {
  kJsonObject,     // any JSON object; no text
  kJsonSchema,     // text: a JSON schema
  kRegex,          // text: a regular expression that all of the answer matches
  kChoice,         // text: a JSON list of strings, one of which is the answer
  kGrammar,        // text: EBNF as xgrammar and GBNF write it; the rule `root` is the answer
  kStructuralTag,  // text: xgrammar's structural tag, for calls of tools
};

struct GrammarSpec {
  GrammarKind kind = GrammarKind::kJsonObject;
  std::string text;
  bool strict = false;  // a JSON schema's objects have no properties but those that it names

  bool operator==(const GrammarSpec&) const = default;
};

// The tokens of a model.
struct Vocabulary {
  std::vector<std::string> tokens;  // [id]: its bytes; empty: special or unused, in no answer
  std::vector<int32_t> end_ids;     // end an answer
  int32_t width = 0;                // logits of a row, at least as many as tokens; the others are in no answer
};

// Words of a mask over so many tokens: bit i % 32 of word i / 32 is token i.
inline size_t MaskWords(int32_t width) { return (static_cast<size_t>(width) + 31) / 32; }

// Follows one answer, token by token. One thread at a time.
class TokenMatcher {
 public:
  virtual ~TokenMatcher() = default;
  // Sets the bits of the tokens that may come next and clears all others. None is left only where the vocabulary cannot
  // spell what the grammar wants. ResourceExhausted: the token takes more time or memory than an answer has for one;
  // nothing can follow. REQUIRES: !ended(); `mask` has MaskWords(width) words. Cost: some us in most states, some ms in
  // others.
  virtual absl::Status FillMask(std::span<uint32_t> mask) = 0;
  // InvalidArgument: the token may not come next, and nothing has changed. ResourceExhausted: as above.
  virtual absl::Status Accept(int32_t token) = 0;
  // An end token was accepted: nothing comes behind it.
  virtual bool ended() const = 0;
  // Whether the answer could end here.
  virtual bool complete() const = 0;
};

// A grammar, compiled for one vocabulary. Immutable; any thread.
class TokenGrammar {
 public:
  virtual ~TokenGrammar() = default;
  // The matcher of an answer that begins. It keeps what it needs of the grammar alive.
  virtual std::unique_ptr<TokenMatcher> NewMatcher() const = 0;
  virtual int32_t width() const = 0;  // that of the vocabulary
  virtual size_t num_bytes() const = 0;
};

// Compiles grammars for one vocabulary. Any thread.
class GrammarCompiler {
 public:
  virtual ~GrammarCompiler() = default;
  // Runs on the calling thread, some ms to 10 s of its time. InvalidArgument says which part of the text is wrong, is
  // not supported or takes too much.
  virtual absl::StatusOr<std::shared_ptr<const TokenGrammar>> Compile(const GrammarSpec& spec) const = 0;
};

}  // namespace spl::grammar
