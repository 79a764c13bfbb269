// Reads a BPE model from tokenizer.json and makes the tables for encoding.
#include <utility>

#include "services/base/field_error.h"
#include "services/base/status.h"
#include "services/tokenizer/bpe.h"
#include "services/tokenizer/byte_level.h"

namespace spl::tokenizer {

absl::StatusOr<std::unique_ptr<Bpe>> Bpe::Parse(const JsonField& model, bool byte_level) {
  SPLICE_RETURN_IF_ERROR(model.CheckObject());
  // Files from before 2023 have no type.
  SPLICE_ASSIGN_OR_RETURN(const std::string type, model.StringOr("type", "BPE"));
  if (type != "BPE") return InvalidArgument("{}: the model \"{}\" is not supported, only BPE is", model.path, type);
  auto bpe = std::make_unique<Bpe>();
  bpe->byte_level_ = byte_level;
  SPLICE_ASSIGN_OR_RETURN(const JsonField vocab, model.Require("vocab"));
  SPLICE_RETURN_IF_ERROR(bpe->ParseVocab(vocab));
  SPLICE_ASSIGN_OR_RETURN(const JsonField merges, model.Require("merges"));
  SPLICE_RETURN_IF_ERROR(bpe->ParseMerges(merges));
  SPLICE_RETURN_IF_ERROR(bpe->ParseOptions(model));
  if (byte_level) bpe->PrepareByteLevel();
  bpe->PrepareDirect();
  return bpe;
}

absl::Status Bpe::ParseVocab(const JsonField& vocab) {
  SPLICE_RETURN_IF_ERROR(vocab.CheckObject());
  if (vocab.value->empty()) return InvalidArgument("{} is empty", vocab.path);
  ids_.reserve(vocab.value->size());
  for (const auto& [token, value] : vocab.value->items()) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(kTokenIdMax)) {
      const JsonField entry{&value, fmt::format("{}[\"{}\"]", vocab.path, token)};
      return entry.Wrong(fmt::format("an integer between 0 and {}", kTokenIdMax));
    }
    const auto id = value.get<int64_t>();
    if (static_cast<size_t>(id) >= pieces_.size()) {
      pieces_.resize(id + 1);
      has_.resize(id + 1, false);
    }
    if (has_[id]) return InvalidArgument("{} gives the id {} to \"{}\" and \"{}\"", vocab.path, id, pieces_[id], token);
    has_[id] = true;
    pieces_[id] = token;
    ids_.emplace(token, static_cast<TokenId>(id));
  }
  return absl::OkStatus();
}

absl::Status Bpe::AddMerge(const JsonField& field, std::string_view left, std::string_view right) {
  const std::optional<TokenId> left_id = IdOf(left);
  const std::optional<TokenId> right_id = IdOf(right);
  if (!left_id || !right_id) {
    return InvalidArgument("{} names \"{}\", which the vocabulary does not have", field.path, left_id ? right : left);
  }
  const std::string merged = std::string(left) + std::string(right);
  const std::optional<TokenId> merged_id = IdOf(merged);
  if (!merged_id) return InvalidArgument("{} makes \"{}\", which the vocabulary does not have", field.path, merged);
  merges_[PairKey(*left_id, *right_id)] = {next_rank_++, *merged_id};
  return absl::OkStatus();
}

absl::Status Bpe::ParseMerges(const JsonField& merges) {
  SPLICE_RETURN_IF_ERROR(merges.CheckList());
  merges_.reserve(merges.value->size());
  for (size_t i = 0; i < merges.value->size(); ++i) {
    const JsonField field = merges.At(i);
    const nlohmann::json& merge = *field.value;
    if (merge.is_array()) {
      if (merge.size() != 2 || !merge[0].is_string() || !merge[1].is_string()) {
        return field.Wrong("two strings");
      }
      SPLICE_RETURN_IF_ERROR(
          AddMerge(field, merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()));
      continue;
    }
    if (!merge.is_string()) return field.Wrong("\"a b\" or [\"a\", \"b\"]");
    const std::string_view text = merge.get_ref<const std::string&>();
    if (text.starts_with("#version")) continue;
    const size_t space = text.find(' ');
    if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) {
      return FieldError(field.path, fmt::format("must be two tokens with one space between, got \"{}\"", text));
    }
    SPLICE_RETURN_IF_ERROR(AddMerge(field, text.substr(0, space), text.substr(space + 1)));
  }
  return absl::OkStatus();
}

absl::Status Bpe::ParseOptions(const JsonField& model) {
  if (const std::optional<JsonField> dropout = model.Find("dropout")) {
    if (!dropout->value->is_number()) return dropout->Wrong("a number");
    if (dropout->value->get<double>() != 0) return InvalidArgument("{} is not supported: it is random", dropout->path);
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    SPLICE_ASSIGN_OR_RETURN(const std::string affix, model.StringOr(key, ""));
    if (!affix.empty()) return InvalidArgument("{}.{} is not supported", model.path, key);
  }
  SPLICE_ASSIGN_OR_RETURN(ignore_merges_, model.BoolOr("ignore_merges", false));
  SPLICE_ASSIGN_OR_RETURN(byte_fallback_, model.BoolOr("byte_fallback", false));
  SPLICE_ASSIGN_OR_RETURN(fuse_unk_, model.BoolOr("fuse_unk", false));
  SPLICE_ASSIGN_OR_RETURN(const std::string unk, model.StringOr("unk_token", ""));
  if (!unk.empty()) {
    const std::optional<TokenId> id = IdOf(unk);
    if (!id) return InvalidArgument("{}.unk_token is \"{}\", which the vocabulary does not have", model.path, unk);
    unk_id_ = *id;
  }
  for (int byte = 0; byte < 256; ++byte) {
    fallback_of_byte_[byte] = IdOf(fmt::format("<0x{:02X}>", byte)).value_or(-1);
  }
  return absl::OkStatus();
}

void Bpe::PrepareByteLevel() {
  for (int byte = 0; byte < 256; ++byte) {
    const std::string raw(1, static_cast<char>(byte));
    id_of_byte_[byte] = IdOf(BytesToChars(raw)).value_or(-1);
  }
}

void Bpe::PrepareDirect() {
  direct_.reserve(ids_.size());
  std::vector<TokenId> encoded;
  for (const auto& [token, id] : ids_) {
    std::optional<std::string> piece = byte_level_ ? CharsToBytes(token) : token;
    if (!piece || piece->empty()) continue;
    if (!ignore_merges_) {
      encoded.clear();
      EncodeByMerges(*piece, &encoded);
      if (encoded.size() != 1 || encoded[0] != id) continue;
    }
    direct_.emplace(*std::move(piece), id);
  }
}

}  // namespace spl::tokenizer
