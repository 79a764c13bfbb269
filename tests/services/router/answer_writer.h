// Answers that keep to a grammar over the tokens of splice-tiny, and are otherwise as unlike one as they can be.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/services/grammar/vocabularies.h"

namespace spl::router {

// Writes an answer: random tokens and traps, then whatever ends it.
class AnswerWriter {
 public:
  struct Words {
    std::vector<std::string> traps;  // that a model might write in the wrong place
    std::vector<std::string> ends;   // that end a part of an answer
  };

  // `tags`: texts of special tokens; those that end something come last.
  AnswerWriter(const grammar::TokenGrammar& grammar, const std::map<int32_t, std::string>& tags, const Words& words,
               uint64_t seed)
      : words_(words),
        tokens_(grammar::Tiny().vocabulary.tokens),
        matcher_(grammar.NewMatcher()),
        mask_(grammar::MaskWords(grammar.width())),
        random_(seed) {
    for (const auto& [id, text] : tags) {
      tokens_[static_cast<size_t>(id)] = text;
      tag_ids_.insert(tag_ids_.begin(), id);  // those that end something come first
    }
    for (size_t id = 0; id < tokens_.size(); ++id) {
      if (tokens_[id].size() == 1) byte_ids_[tokens_[id][0]] = static_cast<int32_t>(id);
    }
  }

  // Nothing: the answer has not ended.
  std::optional<std::string> Write() {
    for (uint64_t i = 0, n = random_() % 60; i < n && !matcher_->ended(); ++i) {
      if (random_() % 2 == 0) {
        Text(words_.traps[random_() % words_.traps.size()]);
      } else {
        AnyToken();
      }
    }
    for (size_t i = 0; i < 1500 && !matcher_->ended(); ++i) {
      if (End()) break;
      if (i % 2 == 0) {
        Text(words_.ends[i / 2 % words_.ends.size()]);
      } else {
        AnyToken();
      }
    }
    if (!matcher_->ended()) return std::nullopt;
    return text_;
  }

 private:
  bool Allows(int32_t id) const { return (mask_[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0; }
  void Fill() {
    const absl::Status filled = matcher_->FillMask(mask_);
    ASSERT_TRUE(filled.ok()) << filled << " behind " << text_;
  }
  void Accept(int32_t id) {
    const absl::Status accepted = matcher_->Accept(id);
    ASSERT_TRUE(accepted.ok()) << accepted << " behind " << text_;
    if (!matcher_->ended()) text_ += tokens_[static_cast<size_t>(id)];
  }
  bool End() {
    Fill();
    for (const int32_t id : grammar::Tiny().vocabulary.end_ids) {
      if (!Allows(id)) continue;
      Accept(id);
      return true;
    }
    for (const int32_t id : tag_ids_) {
      if (!Allows(id)) continue;
      Accept(id);
      return false;
    }
    return false;
  }
  // As far as it fits.
  void Text(std::string_view text) {
    for (const char c : text) {
      Fill();
      if (!Allows(byte_ids_.at(c))) return;
      Accept(byte_ids_.at(c));
    }
  }
  void AnyToken() {
    Fill();
    std::vector<int32_t> allowed;
    for (int32_t id = 0; id < static_cast<int32_t>(tokens_.size()); ++id) {
      if (Allows(id)) allowed.push_back(id);
    }
    ASSERT_FALSE(allowed.empty()) << "nothing fits behind " << text_;
    Accept(allowed[random_() % allowed.size()]);
  }

  const Words& words_;
  std::vector<std::string> tokens_;
  std::vector<int32_t> tag_ids_;
  std::map<char, int32_t> byte_ids_;
  const std::unique_ptr<grammar::TokenMatcher> matcher_;
  std::vector<uint32_t> mask_;
  std::mt19937_64 random_;
  std::string text_;
};

}  // namespace spl::router
