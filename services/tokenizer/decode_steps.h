// The steps that Decoder chains. Each is one text's state: one thread at a time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "services/tokenizer/decoder.h"
#include "services/tokenizer/pattern.h"

namespace spl::tokenizer {

// "a", "b" → "a", " b"
class JoinWithSpaces final : public DecodeStep {
 public:
  absl::Status Push(std::string token, std::vector<std::string>* out) override;
  absl::Status Finish(std::vector<std::string>* out) override;

 private:
  bool first_ = true;
};

// Collects fragments into the one token they are.
class HoldAll final : public DecodeStep {
 public:
  absl::Status Push(std::string token, std::vector<std::string>* out) override;
  absl::Status Finish(std::vector<std::string>* out) override;

 private:
  std::string held_;
};

// Byte-level characters to text; a token with any other character stands for its own bytes. Holds back at most the 3
// bytes of a character that is not complete.
class BytesFromChars final : public DecodeStep {
 public:
  absl::Status Push(std::string token, std::vector<std::string>* out) override;
  absl::Status Finish(std::vector<std::string>* out) override;

 private:
  std::string pending_;
};

// A run of "<0x..>" tokens to text. One bad byte makes every byte of its run U+FFFD (the reference's rule), so a run is
// held back until it ends.
class BytesFromFallback final : public DecodeStep {
 public:
  absl::Status Push(std::string token, std::vector<std::string>* out) override;
  absl::Status Finish(std::vector<std::string>* out) override;

 private:
  std::string run_;
};

class ReplaceInToken final : public DecodeStep {
 public:
  ReplaceInToken(std::shared_ptr<const Pattern> pattern, std::string content);
  absl::Status Push(std::string token, std::vector<std::string>* out) override;
  absl::Status Finish(std::vector<std::string>* out) override;

 private:
  std::shared_ptr<const Pattern> pattern_;
  std::string content_;
};

// Removes up to `start` leading and `stop` trailing `content` of a token.
struct StripOptions {
  std::string content;
  size_t start = 0;
  size_t stop = 0;
};

class StripToken final : public DecodeStep {
 public:
  explicit StripToken(StripOptions options);
  absl::Status Push(std::string token, std::vector<std::string>* out) override;
  absl::Status Finish(std::vector<std::string>* out) override;

 private:
  StripOptions options_;
};

// The same on the one token that everything was joined into; holds back what may be its end.
class StripFused final : public DecodeStep {
 public:
  explicit StripFused(StripOptions options);
  absl::Status Push(std::string token, std::vector<std::string>* out) override;
  absl::Status Finish(std::vector<std::string>* out) override;

 private:
  StripOptions options_;
  size_t num_to_strip_;  // leading ones that may still be removed
  std::string pending_;
};

// Metaspace back to spaces; the ones of the first token are what encoding put in front.
class MetaspaceToSpace final : public DecodeStep {
 public:
  MetaspaceToSpace(std::string replacement, bool prepends);
  absl::Status Push(std::string token, std::vector<std::string>* out) override;
  absl::Status Finish(std::vector<std::string>* out) override;

 private:
  std::string replacement_;
  bool drop_;
};

}  // namespace spl::tokenizer
