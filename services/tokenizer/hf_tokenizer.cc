#include "services/tokenizer/hf_tokenizer.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "services/base/json_parser.h"
#include "services/base/status.h"
#include "services/text/utf8.h"

namespace spl::tokenizer {
namespace {

// A member of the object; a null field: it is absent.
JsonField Optional(const JsonField& root, std::string_view key) {
  static const nlohmann::json null_value;
  const std::optional<JsonField> member = root.Find(key);
  return member ? *member : JsonField{&null_value, root.path + std::string(key)};
}

}  // namespace

absl::StatusOr<std::unique_ptr<HfTokenizer>> HfTokenizer::Parse(std::string_view json, const std::string& name) {
  SPLICE_ASSIGN_OR_RETURN(const nlohmann::json document, ParseJsonObject(json, name));
  const JsonField root{&document, name + ": "};
  auto tokenizer = std::make_unique<HfTokenizer>();
  if (const JsonField normalizer = Optional(root, "normalizer"); !normalizer.is_null()) {
    SPLICE_ASSIGN_OR_RETURN(tokenizer->normalizer_, ParseNormalizer(normalizer));
  }
  SPLICE_ASSIGN_OR_RETURN(tokenizer->pre_tokenizer_, PreTokenizer::Parse(Optional(root, "pre_tokenizer")));
  SPLICE_ASSIGN_OR_RETURN(const JsonField model, root.Require("model"));
  SPLICE_ASSIGN_OR_RETURN(tokenizer->bpe_, Bpe::Parse(model, tokenizer->pre_tokenizer_.byte_level()));
  tokenizer->pieces_.resize(tokenizer->bpe_->max_id() + 1);
  for (TokenId id = 0; id <= tokenizer->bpe_->max_id(); ++id) tokenizer->pieces_[id] = tokenizer->bpe_->PieceOf(id);
  tokenizer->special_.resize(tokenizer->pieces_.size(), false);
  SPLICE_RETURN_IF_ERROR(tokenizer->ParseAddedTokens(root));
  const JsonField post_processor = Optional(root, "post_processor");
  SPLICE_ASSIGN_OR_RETURN(tokenizer->post_processor_, PostProcessor::Parse(post_processor));
  for (const TokenId id : tokenizer->post_processor_.AddedIds()) {
    SPLICE_RETURN_IF_ERROR(tokenizer->CheckKnown(id, post_processor.path));
  }
  SPLICE_ASSIGN_OR_RETURN(tokenizer->decoder_, Decoder::Parse(Optional(root, "decoder")));
  return tokenizer;
}

absl::Status HfTokenizer::ParseAddedTokens(const JsonField& root) {
  const JsonField list = Optional(root, "added_tokens");
  if (list.is_null()) return absl::OkStatus();
  SPLICE_RETURN_IF_ERROR(list.CheckList());
  for (size_t i = 0; i < list.value->size(); ++i) {
    SPLICE_ASSIGN_OR_RETURN(const AddedToken token, ParseAddedToken(list.At(i), std::nullopt));
    if (added_ids_.contains(token.content)) {
      return InvalidArgument("{} adds \"{}\" a second time", list.At(i).path, token.content);
    }
    SPLICE_RETURN_IF_ERROR(AddToken(token, list.At(i).path));
  }
  return absl::OkStatus();
}

absl::Status HfTokenizer::AddToken(const AddedToken& token, const std::string& where) {
  if (const std::optional<TokenId> known = IdOf(token.content); known && *known != token.id) {
    return InvalidArgument("{} gives \"{}\" the id {}, but it is {} already", where, token.content, token.id, *known);
  }
  if (const std::string_view piece = Piece(token.id); !piece.empty() && piece != token.content) {
    return InvalidArgument("{} gives the id {} to \"{}\", but it is \"{}\" already", where, token.id, token.content,
                           piece);
  }
  if (added_ids_.contains(token.content)) return absl::OkStatus();
  if (static_cast<size_t>(token.id) >= pieces_.size()) {
    pieces_.resize(token.id + 1);
    special_.resize(token.id + 1, false);
  }
  const AddedToken& kept = added_.emplace_back(token);
  pieces_[token.id] = kept.content;
  special_[token.id] = token.special;
  added_ids_.emplace(token.content, token.id);
  if (!token.normalized) {
    raw_matcher_.Add(kept, kept.content);
    return absl::OkStatus();
  }
  std::string spelling = kept.content;
  if (normalizer_ != nullptr) SPLICE_RETURN_IF_ERROR(normalizer_->Apply(&spelling));
  normalized_matcher_.Add(kept, spelling);
  if (kept.special) spelled_matcher_.Add(kept, kept.content);
  return absl::OkStatus();
}

absl::Status HfTokenizer::CheckKnown(TokenId id, const std::string& where) const {
  if (!Piece(id).empty()) return absl::OkStatus();
  return InvalidArgument("{} names the id {}, which the vocabulary does not have", where, id);
}

absl::Status HfTokenizer::SetBos(TokenId id, const std::string& where) {
  SPLICE_RETURN_IF_ERROR(CheckKnown(id, where));
  bos_id_ = id;
  return absl::OkStatus();
}

absl::Status HfTokenizer::AddEos(TokenId id, const std::string& where) {
  SPLICE_RETURN_IF_ERROR(CheckKnown(id, where));
  if (std::find(eos_ids_.begin(), eos_ids_.end(), id) == eos_ids_.end()) eos_ids_.push_back(id);
  return absl::OkStatus();
}

bool HfTokenizer::IsSpecial(TokenId id) const { return id >= 0 && id < vocab_size() && special_[id]; }

std::vector<size_t> HfTokenizer::SpecialTokensIn(std::string_view text) const {
  const std::vector<size_t> raw = raw_matcher_.SpecialTokensIn(text);
  const std::vector<size_t> spelled = spelled_matcher_.SpecialTokensIn(text);
  std::vector<size_t> positions;
  std::set_union(raw.begin(), raw.end(), spelled.begin(), spelled.end(), std::back_inserter(positions));
  return positions;
}

std::optional<TokenId> HfTokenizer::IdOf(std::string_view token) const {
  const auto it = added_ids_.find(absl::string_view(token.data(), token.size()));
  if (it != added_ids_.end()) return it->second;
  return bpe_->IdOf(token);
}

std::string_view HfTokenizer::Piece(TokenId id) const {
  return id >= 0 && id < vocab_size() ? pieces_[id] : std::string_view();
}

absl::StatusOr<std::vector<TokenId>> HfTokenizer::Encode(std::string_view text, const EncodeOptions& options) const {
  if (const size_t offset = text::FindInvalidUtf8(text); offset != std::string_view::npos) {
    return InvalidArgument("the text is not UTF-8 at byte {}", offset);
  }
  std::vector<TokenId> ids;
  ids.reserve(text.size() / 3 + 8);
  for (const TokenSegment& segment : raw_matcher_.Split(text, options.parse_special_tokens, options.plain_at)) {
    if (segment.id >= 0) {
      ids.push_back(segment.id);
      continue;
    }
    const std::string_view part = text.substr(segment.begin, segment.end - segment.begin);
    std::vector<size_t> plain_at;
    for (const size_t at : options.plain_at) {
      if (at >= segment.begin && at < segment.end) plain_at.push_back(at - segment.begin);
    }
    SPLICE_RETURN_IF_ERROR(EncodeSegment(
        part, segment.begin == 0, {.parse_special_tokens = options.parse_special_tokens, .plain_at = plain_at}, &ids));
  }
  return options.add_special_tokens ? post_processor_.Apply(std::move(ids)) : ids;
}

// Encodes the text between tokens that are found in raw text. Normalization moves special tokens that are searched for
// after it, so that `plain_at` no longer fits. If one of them must be plain, the others are therefore found here, and
// the text between them is encoded without special tokens.
absl::Status HfTokenizer::EncodeSegment(std::string_view text, bool at_start, const EncodeOptions& options,
                                        std::vector<TokenId>* ids) const {
  if (options.plain_at.empty() || spelled_matcher_.empty() || !options.parse_special_tokens)
    return EncodeNormalized(text, at_start, options.parse_special_tokens, ids);
  for (const TokenSegment& segment : spelled_matcher_.Split(text, true, options.plain_at)) {
    if (segment.id >= 0) {
      ids->push_back(segment.id);
      continue;
    }
    const std::string_view part = text.substr(segment.begin, segment.end - segment.begin);
    SPLICE_RETURN_IF_ERROR(EncodeNormalized(part, at_start && segment.begin == 0, false, ids));
  }
  return absl::OkStatus();
}

// Normalizes the text, then splits it at the added tokens that match normalized text.
absl::Status HfTokenizer::EncodeNormalized(std::string_view text, bool at_start, bool parse_special,
                                           std::vector<TokenId>* ids) const {
  std::string normalized;
  if (normalizer_ != nullptr) {
    normalized = std::string(text);
    SPLICE_RETURN_IF_ERROR(normalizer_->Apply(&normalized));
    text = normalized;
  }
  if (normalized_matcher_.empty()) return EncodePlain(text, at_start, ids);
  for (const TokenSegment& segment : normalized_matcher_.Split(text, parse_special)) {
    if (segment.id >= 0) {
      ids->push_back(segment.id);
      continue;
    }
    const std::string_view part = text.substr(segment.begin, segment.end - segment.begin);
    SPLICE_RETURN_IF_ERROR(EncodePlain(part, at_start && segment.begin == 0, ids));
  }
  return absl::OkStatus();
}

absl::Status HfTokenizer::EncodePlain(std::string_view text, bool at_start, std::vector<TokenId>* ids) const {
  Pieces pieces;
  SPLICE_RETURN_IF_ERROR(pre_tokenizer_.Cut({text, at_start}, &pieces));
  for (const spl::tokenizer::Piece& piece : pieces.list) bpe_->Encode(piece.text, ids);
  return absl::OkStatus();
}

std::vector<std::string> HfTokenizer::TokenBytes() const {
  std::vector<std::string> bytes(pieces_.size());
  for (size_t id = 0; id < pieces_.size(); ++id) {
    if (!pieces_[id].empty() && !special_[id]) bytes[id] = decoder_.BytesOf(pieces_[id]);
  }
  return bytes;
}

absl::StatusOr<std::optional<std::string_view>> HfTokenizer::PieceToDecode(TokenId id,
                                                                           const DecodeOptions& options) const {
  const std::string_view piece = Piece(id);
  if (piece.empty()) {
    return InvalidArgument("the token id {} is not in the vocabulary of {} tokens", id, vocab_size());
  }
  if (options.skip_special_tokens && special_[id]) return std::optional<std::string_view>();
  return std::optional<std::string_view>(piece);
}

absl::StatusOr<std::string> HfTokenizer::Decode(std::span<const TokenId> ids, const DecodeOptions& options) const {
  std::string text;
  DecodeState state = decoder_.NewState();
  for (const TokenId id : ids) {
    SPLICE_ASSIGN_OR_RETURN(const std::optional<std::string_view> piece, PieceToDecode(id, options));
    if (piece) SPLICE_RETURN_IF_ERROR(state.Push(std::string(*piece), &text));
  }
  SPLICE_RETURN_IF_ERROR(state.Finish(&text));
  return text;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromJson(std::string_view tokenizer_json) {
  return HfTokenizer::Parse(tokenizer_json, "tokenizer.json");
}

}  // namespace spl::tokenizer
