#include "services/tokenizer/ids_only.h"

namespace spl::tokenizer {
namespace {

class IdsOnlyTokenizer final : public Tokenizer {
 public:
  absl::StatusOr<std::vector<TokenId>> Encode(std::string_view, const EncodeOptions&) const override {
    return absl::InvalidArgumentError("this model has no tokenizer; send token ids");
  }
  absl::StatusOr<std::string> Decode(std::span<const TokenId>, const DecodeOptions&) const override { return ""; }
  int32_t vocab_size() const override { return 0; }
  std::optional<TokenId> bos_id() const override { return std::nullopt; }
  std::span<const TokenId> eos_ids() const override { return {}; }
  bool IsSpecial(TokenId) const override { return false; }
  std::vector<size_t> SpecialTokensIn(std::string_view) const override { return {}; }
  std::optional<TokenId> IdOf(std::string_view) const override { return std::nullopt; }
  std::string_view Piece(TokenId) const override { return {}; }
  std::vector<std::string> TokenBytes() const override { return {}; }
};

}  // namespace

std::unique_ptr<Tokenizer> MakeIdsOnlyTokenizer() { return std::make_unique<IdsOnlyTokenizer>(); }

}  // namespace spl::tokenizer
