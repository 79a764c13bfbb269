// Byte-pair encoding, the "model" of tokenizer.json: joins neighbouring symbols in the order of the merge table.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "services/base/json_field.h"
#include "services/tokenizer/tokenizer.h"

namespace spl::tokenizer {

// Real vocabularies have fewer than 300,000 tokens. The bound keeps a broken file from allocating gigabytes.
inline constexpr int64_t kTokenIdMax = (1 << 22) - 1;

// Immutable after Parse; any thread.
class Bpe {
 public:
  // `byte_level`: pieces are raw bytes and the vocabulary spells them in the byte-level alphabet. InvalidArgument:
  // another model than BPE; an unsupported option that changes results (dropout, affixes); ids that are negative, too
  // large or given twice; merges that name or make unknown tokens.
  static absl::StatusOr<std::unique_ptr<Bpe>> Parse(const JsonField& model, bool byte_level);

  // Appends the tokens of one piece. A character that the vocabulary cannot spell becomes the unknown token; without an
  // unknown token it is dropped, as in the reference. Cost: one look-up for a piece that is a token; otherwise O(n log
  // n) for n bytes.
  void Encode(std::string_view piece, std::vector<TokenId>* out) const;

  std::optional<TokenId> IdOf(std::string_view token) const;
  // Empty for an unknown id.
  std::string_view PieceOf(TokenId id) const;
  bool Has(TokenId id) const;
  TokenId max_id() const { return static_cast<TokenId>(pieces_.size()) - 1; }

 private:
  struct Merge {
    int32_t rank = 0;
    TokenId merged = 0;
  };
  using TextMap = absl::flat_hash_map<std::string, TokenId>;

  static uint64_t PairKey(TokenId left, TokenId right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  static std::optional<TokenId> Find(const TextMap& map, std::string_view text);

  absl::Status ParseVocab(const JsonField& vocab);
  absl::Status ParseMerges(const JsonField& merges);
  absl::Status AddMerge(const JsonField& field, std::string_view left, std::string_view right);
  absl::Status ParseOptions(const JsonField& model);
  void PrepareByteLevel();
  void PrepareDirect();

  const Merge* FindMerge(TokenId left, TokenId right) const;
  void EncodeByMerges(std::string_view piece, std::vector<TokenId>* out) const;
  bool SpellBytes(std::string_view piece, std::vector<TokenId>* symbols) const;
  void SpellChars(std::string_view text, std::vector<TokenId>* symbols) const;
  bool SpellByFallback(std::string_view character, std::vector<TokenId>* symbols) const;
  void MergeShort(std::vector<TokenId>* symbols) const;
  void MergeLong(std::vector<TokenId>* symbols) const;

  std::vector<std::string> pieces_;  // by id
  std::vector<bool> has_;            // by id
  TextMap ids_;                      // piece, as the vocabulary spells it → id
  absl::flat_hash_map<uint64_t, Merge> merges_;
  int32_t next_rank_ = 0;
  // Pieces that are one token: with ignore_merges the whole vocabulary, otherwise those that the merges really lead to.
  TextMap direct_;
  std::array<TokenId, 256> id_of_byte_{};        // byte level: the symbol of each byte, -1 for none
  std::array<TokenId, 256> fallback_of_byte_{};  // byte fallback: the token "<0x..>", -1 for none
  bool byte_level_ = false;
  bool ignore_merges_ = false;
  bool byte_fallback_ = false;
  bool fuse_unk_ = false;
  TokenId unk_id_ = -1;
};

}  // namespace spl::tokenizer
