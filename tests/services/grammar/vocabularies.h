// Tokens to compile grammars for: those of splice-tiny, and so many as large models have.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <set>
#include <string>

#include "services/grammar/grammar_plugin.h"
#include "services/grammar/token_grammar.h"
#include "services/tokenizer/tokenizer.h"

namespace spl::grammar {

inline constexpr uint64_t kSeed = 20'261'125;

struct TinyCompiler {
  std::unique_ptr<tokenizer::Tokenizer> tokenizer;
  Vocabulary vocabulary;
  std::unique_ptr<GrammarCompiler> compiler;  // null: there is no plug-in
};

inline const TinyCompiler& Tiny() {
  static const TinyCompiler tiny = [] {
    TinyCompiler made;
    auto loaded = tokenizer::Tokenizer::Load("models/splice-tiny");
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    made.tokenizer = *std::move(loaded);
    made.vocabulary = {made.tokenizer->TokenBytes(),
                       {made.tokenizer->eos_ids().begin(), made.tokenizer->eos_ids().end()},
                       made.tokenizer->vocab_size() + 7};
    auto compiler = MakeGrammarCompiler(made.vocabulary);
    if (compiler.ok()) made.compiler = *std::move(compiler);
    return made;
  }();
  return tiny;
}

// A vocabulary of the size that models have now: bytes, then words, numbers and signs out of random letters.
inline Vocabulary BigVocabulary() {
  constexpr size_t kTokens = 128 << 10;
  std::mt19937 random(kSeed);
  const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  Vocabulary made;
  std::set<std::string> seen;
  const auto add = [&](std::string token) {
    if (seen.insert(token).second) made.tokens.push_back(std::move(token));
  };
  for (int byte = 0; byte < 256; ++byte) add(std::string(1, static_cast<char>(byte)));
  for (int number = 0; number < 1000; ++number) add(std::to_string(number));
  while (made.tokens.size() < kTokens) {
    std::string token = below(5) < 3 ? " " : "";
    const uint32_t kind = below(20);
    for (uint32_t i = 0, n = 1 + below(4) + below(8); i < n; ++i) {
      if (kind == 0)
        token += "{}[]()\",:;.-_/\\ \n"[below(17)];
      else if (kind <= 2)
        token += "\xc3" + std::string(1, static_cast<char>(0xa0 + below(30)));
      else
        token += static_cast<char>((kind == 3 && i == 0 ? 'A' : 'a') + below(26));
    }
    add(std::move(token));
  }
  made.tokens.emplace_back();
  made.end_ids = {static_cast<int32_t>(kTokens)};
  made.width = static_cast<int32_t>(kTokens) + 64;
  return made;
}

}  // namespace spl::grammar
