// Any bytes as a tokenizer.json: an error or a tokenizer, and what that encodes it decodes, streaming or not.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "services/tokenizer/tokenizer.h"

using spl::tokenizer::DecodeOptions;
using spl::tokenizer::EncodeOptions;
using spl::tokenizer::StreamDecoder;
using spl::tokenizer::TokenId;
using spl::tokenizer::Tokenizer;

namespace {

constexpr std::string_view kTexts[] = {"", "ab <s>c\n 12 \xC3\xA9\xE6\x97\xA5 the",
                                       "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"};

void CheckDecoding(const Tokenizer& tokenizer, const std::vector<TokenId>& ids) {
  const auto whole = tokenizer.Decode(ids, DecodeOptions{false});
  StreamDecoder stream(tokenizer, DecodeOptions{false});
  std::string joined;
  bool failed = false;
  for (const TokenId id : ids) {
    const auto piece = stream.Append(id);
    failed |= !piece.ok();
    if (piece.ok()) joined += *piece;
  }
  joined += stream.Finish();
  if (whole.ok() && (failed || joined != *whole)) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto parsed = Tokenizer::FromJson(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!parsed.ok()) {
    if (parsed.status().message().empty()) std::abort();
    return 0;
  }
  const Tokenizer& tokenizer = **parsed;
  for (const std::string_view text : kTexts) {
    for (const bool flag : {true, false}) {
      const auto ids = tokenizer.Encode(text, EncodeOptions{flag, flag});
      if (!ids.ok()) continue;
      for (const TokenId id : *ids) {
        if (id < 0 || id >= tokenizer.vocab_size() || tokenizer.Piece(id).empty()) std::abort();
      }
      CheckDecoding(tokenizer, *ids);
    }
  }
  return 0;
}
