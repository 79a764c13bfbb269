// The "decoder" of tokenizer.json: tokens back to text. It is written as a chain of streaming steps, so that decoding a
// finished list and decoding a growing one are the same code and cannot differ.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/tokenizer/json_fields.h"

namespace spl::tokenizer {

// One step at work on one text. A step is given tokens (or, after a step that joins all tokens into one, fragments of
// that one) and passes on what later input can no longer change. One thread at a time.
class DecodeStep {
 public:
  virtual ~DecodeStep() = default;
  virtual absl::Status Push(std::string token, std::vector<std::string>* out) = 0;
  virtual absl::Status Finish(std::vector<std::string>* out) = 0;
};

// The chain at work on one text. The Decoder must outlive it.
class DecodeState {
 public:
  explicit DecodeState(std::vector<std::unique_ptr<DecodeStep>> steps) : steps_(std::move(steps)) {}

  // Appends to `text` what the token settles.
  absl::Status Push(std::string token, std::string* text);
  // Appends what was held back. The state is done.
  absl::Status Finish(std::string* text);

 private:
  absl::Status RunFrom(size_t step_idx, std::vector<std::string> tokens, std::string* text);

  std::vector<std::unique_ptr<DecodeStep>> steps_;
};

// Immutable; may be used from any thread at once.
class Decoder {
 public:
  // Sequence, ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace; InvalidArgument names any other type. A null
  // field joins the tokens with spaces, as the reference does.
  static absl::StatusOr<Decoder> Parse(const JsonField& field);

  DecodeState NewState() const;

 private:
  using Factory = std::function<std::unique_ptr<DecodeStep>()>;
  absl::Status ParseInto(const JsonField& field, int depth);
  absl::Status AddReplace(const JsonField& field);
  absl::Status AddStrip(const JsonField& field);
  absl::Status AddMetaspace(const JsonField& field);
  void Add(Factory factory);

  std::vector<Factory> factories_;
  bool fused_ = false;  // a step so far joins all tokens into one
};

}  // namespace spl::tokenizer
