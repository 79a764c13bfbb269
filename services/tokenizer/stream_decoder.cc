#include <utility>

#include "services/base/status.h"
#include "services/tokenizer/hf_tokenizer.h"

namespace spl::tokenizer {

struct StreamDecoder::Impl {
  const HfTokenizer* tokenizer = nullptr;  // null: a Tokenizer that this library did not make
  DecodeOptions options;
  DecodeState state;
};

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, const DecodeOptions& options) {
  const auto* known = dynamic_cast<const HfTokenizer*>(&tokenizer);
  impl_ = std::make_unique<Impl>(Impl{known, options, known != nullptr ? known->NewDecodeState() : DecodeState({})});
}

StreamDecoder::~StreamDecoder() = default;
StreamDecoder::StreamDecoder(StreamDecoder&&) noexcept = default;
StreamDecoder& StreamDecoder::operator=(StreamDecoder&&) noexcept = default;

absl::StatusOr<std::string> StreamDecoder::Append(TokenId id) {
  if (impl_->tokenizer == nullptr) {
    return absl::FailedPreconditionError(
        "StreamDecoder works with tokenizers made by Tokenizer::Load or FromJson only");
  }
  SPLICE_ASSIGN_OR_RETURN(const std::optional<std::string_view> piece,
                          impl_->tokenizer->PieceToDecode(id, impl_->options));
  std::string text;
  if (piece) SPLICE_RETURN_IF_ERROR(impl_->state.Push(std::string(*piece), &text));
  return text;
}

std::string StreamDecoder::Finish() {
  std::string text;
  // This fails only if a pattern exceeds its match limit on the text that was held back. Text that is final already is
  // still right.
  impl_->state.Finish(&text).IgnoreError();
  return text;
}

}  // namespace spl::tokenizer
