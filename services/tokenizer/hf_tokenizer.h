// The implementation of Tokenizer: the components of one tokenizer.json, and additions from the other files of its
// folder.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "services/base/json_field.h"
#include "services/tokenizer/added_tokens.h"
#include "services/tokenizer/bpe.h"
#include "services/tokenizer/decoder.h"
#include "services/tokenizer/normalizer.h"
#include "services/tokenizer/post_processor.h"
#include "services/tokenizer/pre_tokenizer.h"
#include "services/tokenizer/tokenizer.h"

namespace spl::tokenizer {

class HfTokenizer final : public Tokenizer {
 public:
  // `name`: the file's name in error messages.
  static absl::StatusOr<std::unique_ptr<HfTokenizer>> Parse(std::string_view json, const std::string& name);

  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text, const EncodeOptions& options) const override;
  absl::StatusOr<std::string> Decode(std::span<const TokenId> ids, const DecodeOptions& options) const override;
  int32_t vocab_size() const override { return static_cast<int32_t>(pieces_.size()); }
  std::optional<TokenId> bos_id() const override { return bos_id_; }
  std::span<const TokenId> eos_ids() const override { return eos_ids_; }
  bool IsSpecial(TokenId id) const override;
  std::vector<size_t> SpecialTokensIn(std::string_view text) const override;
  std::optional<TokenId> IdOf(std::string_view token) const override;
  std::string_view Piece(TokenId id) const override;
  std::vector<std::string> TokenBytes() const override;

  DecodeState NewDecodeState() const { return decoder_.NewState(); }
  // The text of `id` for the decoder. InvalidArgument: unknown id. nullopt: `id` is special and special tokens are
  // skipped.
  absl::StatusOr<std::optional<std::string_view>> PieceToDecode(TokenId id, const DecodeOptions& options) const;

  // Only for loading, before the tokenizer is shared. InvalidArgument: the token contradicts one that is known already.
  absl::Status AddToken(const AddedToken& token, const std::string& where);
  absl::Status SetBos(TokenId id, const std::string& where);
  absl::Status AddEos(TokenId id, const std::string& where);

 private:
  absl::Status ParseAddedTokens(const JsonField& root);
  absl::Status CheckKnown(TokenId id, const std::string& where) const;
  absl::Status EncodeSegment(std::string_view text, bool at_start, const EncodeOptions& options,
                             std::vector<TokenId>* ids) const;
  absl::Status EncodeNormalized(std::string_view text, bool at_start, bool parse_special,
                                std::vector<TokenId>* ids) const;
  absl::Status EncodePlain(std::string_view text, bool at_start, std::vector<TokenId>* ids) const;

  std::unique_ptr<Normalizer> normalizer_;  // null: none
  PreTokenizer pre_tokenizer_;
  std::unique_ptr<Bpe> bpe_;
  AddedTokenMatcher raw_matcher_;         // tokens searched for before normalization
  AddedTokenMatcher normalized_matcher_;  // tokens searched for after it
  AddedTokenMatcher spelled_matcher_;     // special tokens of normalized_matcher_, as they are spelled before it
  PostProcessor post_processor_;
  Decoder decoder_;
  std::vector<std::string_view> pieces_;  // by id; refer to bpe_ and added_; empty: unused id
  std::vector<bool> special_;             // by id
  std::deque<AddedToken> added_;
  absl::flat_hash_map<std::string, TokenId> added_ids_;
  std::optional<TokenId> bos_id_;
  std::vector<TokenId> eos_ids_;
};

}  // namespace spl::tokenizer
