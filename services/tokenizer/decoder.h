// The "decoder" of tokenizer.json: turns tokens into text. It is a chain of streaming steps, so that decoding a
// finished list and decoding a growing one run the same code and cannot differ.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/base/json_field.h"

namespace spl::tokenizer {

// The state of one step for one text. A step gets tokens (after a step that joins all tokens into one: fragments of
// that one) and passes on the text that later input can no longer change. One thread at a time.
class DecodeStep {
 public:
  virtual ~DecodeStep() = default;
  virtual absl::Status Push(std::string token, std::vector<std::string>* out) = 0;
  virtual absl::Status Finish(std::vector<std::string>* out) = 0;
};

// The state of the chain for one text. The Decoder must outlive it. One thread at a time.
class DecodeState {
 public:
  explicit DecodeState(std::vector<std::unique_ptr<DecodeStep>> steps) : steps_(std::move(steps)) {}

  // Appends the text that is final after this token to `text`.
  absl::Status Push(std::string token, std::string* text);
  // Appends the text that was held back. The state cannot be used afterwards.
  absl::Status Finish(std::string* text);

 private:
  absl::Status RunFrom(size_t step_idx, std::vector<std::string> tokens, std::string* text);

  std::vector<std::unique_ptr<DecodeStep>> steps_;
};

// Immutable; any thread.
class Decoder {
 public:
  // Parses Sequence, ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace. InvalidArgument names any other type. A
  // null field: tokens are joined with spaces, as in the reference.
  static absl::StatusOr<Decoder> Parse(const JsonField& field);

  DecodeState NewState() const;
  // The bytes that a token adds to a text behind others, also where they are a part of a character.
  std::string BytesOf(std::string_view token) const;

 private:
  using Factory = std::function<std::unique_ptr<DecodeStep>()>;
  absl::Status ParseInto(const JsonField& field, int depth);
  absl::Status AddReplace(const JsonField& field);
  absl::Status AddStrip(const JsonField& field);
  absl::Status AddMetaspace(const JsonField& field);
  void Add(Factory factory);

  std::vector<Factory> factories_;
  bool byte_level_ = false, byte_fallback_ = false;
  bool fused_ = false;  // one of the steps so far joins all tokens into one
};

}  // namespace spl::tokenizer
