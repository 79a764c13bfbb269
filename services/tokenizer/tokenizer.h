// Text ↔ token ids, as tokenizer.json of a Hugging Face folder defines it. For the router and the command-line tools:
// below the router everything is token ids.
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
  bool add_special_tokens = false;   // what the post-processor adds (the begin token)
  bool parse_special_tokens = true;  // "<|im_end|>" in the text becomes its id; false: it is plain text
  std::span<const size_t> plain_at;  // ascending byte offsets where no special token begins, whatever is spelled there
};

struct DecodeOptions {
  bool skip_special_tokens = true;
};

// Immutable after Load; every method may be called from any thread at once.
class Tokenizer {
 public:
  // Reads DIR/tokenizer.json (and tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json
  // where present). InvalidArgument names the file and the construct that is not supported; nothing is guessed.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& model_dir);
  // From the text of a tokenizer.json alone (tests, fuzzing).
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromJson(std::string_view tokenizer_json);

  virtual ~Tokenizer() = default;

  // InvalidArgument: not UTF-8 (with the byte offset).
  virtual absl::StatusOr<std::vector<TokenId>> Encode(std::string_view text, const EncodeOptions& options) const = 0;

  // Bytes that are not UTF-8 become U+FFFD, as in the reference. InvalidArgument: an id outside the vocabulary.
  virtual absl::StatusOr<std::string> Decode(std::span<const TokenId> ids, const DecodeOptions& options) const = 0;

  virtual int32_t vocab_size() const = 0;  // largest id + 1, added tokens included
  virtual std::optional<TokenId> bos_id() const = 0;
  virtual std::span<const TokenId> eos_ids() const = 0;  // of generation_config.json, else config, else the eos token
  virtual bool IsSpecial(TokenId id) const = 0;
  // Byte offsets where the text spells a special token, ascending, inside of another one's spelling as well.
  virtual std::vector<size_t> SpecialTokensIn(std::string_view text) const = 0;
  virtual std::optional<TokenId> IdOf(std::string_view token) const = 0;
  // The raw piece of an id as the vocabulary spells it; empty for an unknown id.
  virtual std::string_view Piece(TokenId id) const = 0;
};

// Turns a growing list of ids into text piece by piece, and never emits half a UTF-8 character: bytes of an incomplete
// one are held back until they are complete, impossible, or Finish is called. The pieces joined equal Decode of all
// ids. A vocabulary with byte fallback holds back a run of byte tokens until it ends: one bad byte changes all of the
// run. One object per continuation, one thread at a time; the tokenizer must outlive it.
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

// Finds stop strings in a text that arrives in pieces; a match may lie across pieces. Text that could still become a
// match is held back.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stops);

  struct Result {
    std::string text;      // safe to show
    bool stopped = false;  // a stop string was found: text ends right before it
    int stop_idx = -1;     // which one
  };
  // After a result with stopped, the matcher is done: further calls give empty text.
  Result Append(std::string_view piece);
  // What was held back, when generation ends without a match.
  std::string Finish();

 private:
  std::vector<std::string> stops_;
  std::string pending_;
  bool stopped_ = false;
};

}  // namespace spl::tokenizer
