// Converts between text and token ids, as tokenizer.json of a Hugging Face folder defines it. For the router and the
// command-line tools: all services below the router use token ids only.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl::tokenizer {

using TokenId = int32_t;

struct EncodeOptions {
  bool add_special_tokens = false;   // add those of the post-processor (the begin token)
  bool parse_special_tokens = true;  // "<|im_end|>" in the text becomes its id; false: it is plain text
  std::span<const size_t> plain_at;  // ascending byte offsets at which a special token is plain text
};

struct DecodeOptions {
  bool skip_special_tokens = true;
};

// Immutable after Load; any thread.
class Tokenizer {
 public:
  // Reads DIR/tokenizer.json and, if present, tokenizer_config.json, special_tokens_map.json, generation_config.json
  // and config.json. InvalidArgument names the file and the construct that is not supported; nothing is guessed.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& model_dir);
  // Makes a tokenizer from the text of a tokenizer.json alone (tests, fuzzing).
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromJson(std::string_view tokenizer_json);

  virtual ~Tokenizer() = default;

  // InvalidArgument: `text` is not UTF-8; names the byte offset.
  virtual absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text, const EncodeOptions& options) const = 0;

  // Bytes that are not UTF-8 become U+FFFD, as in the reference. InvalidArgument: an id outside the vocabulary.
  virtual absl::StatusOr<std::string> Decode(std::span<const TokenId> ids, const DecodeOptions& options) const = 0;

  virtual int32_t vocab_size() const = 0;  // largest id + 1, added tokens included
  virtual std::optional<TokenId> bos_id() const = 0;
  virtual std::span<const TokenId> eos_ids() const = 0;  // from generation_config.json, else config, else the eos token
  virtual bool IsSpecial(TokenId id) const = 0;
  // Byte offsets at which the text spells a special token, ascending, also inside of the spelling of another one.
  virtual std::vector<size_t> SpecialTokensIn(std::string_view text) const = 0;
  virtual std::optional<TokenId> IdOf(std::string_view token) const = 0;
  // The raw piece of an id, as the vocabulary spells it. Empty: unknown id.
  virtual std::string_view Piece(TokenId id) const = 0;
  // The bytes that each id adds to a text, behind others. Empty: special and unknown ids. Costs some 100 ns an id.
  virtual std::vector<std::string> TokenBytes() const = 0;
};

// Decodes a growing list of ids piece by piece. Never emits half a UTF-8 character: bytes of an incomplete one are held
// back until it is complete or impossible, or until Finish. The joined pieces equal Decode of all ids. With byte
// fallback, a run of byte tokens is held back until it ends, because one bad byte changes the whole run. One object per
// continuation, one thread at a time; the tokenizer must outlive it.
class StreamDecoder {
 public:
  StreamDecoder(const Tokenizer& tokenizer, const DecodeOptions& options);
  ~StreamDecoder();
  StreamDecoder(StreamDecoder&&) noexcept;
  StreamDecoder& operator=(StreamDecoder&&) noexcept;

  absl::StatusOr<std::string> Append(TokenId id);
  std::string Finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Finds stop strings in a text that arrives in pieces; a match may span pieces. Holds back text that could still become
// a match.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stops);

  struct Result {
    std::string text;      // safe to show
    bool stopped = false;  // a stop string was found; `text` ends right before it
    int stop_idx = -1;     // index of that stop string; -1: none
  };
  // After a result with `stopped`, further calls give empty text.
  Result Append(std::string_view piece);
  // Returns the text that was held back. Call it if generation ends without a match.
  std::string Finish();

 private:
  std::vector<std::string> stops_;
  std::string pending_;
  bool stopped_ = false;
};

}  // namespace spl::tokenizer
