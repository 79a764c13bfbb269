// The steps that a Decoder chains. Each object is the state of one text; one thread at a time.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "services/tokenizer/decoder.h"
#include "services/tokenizer/pattern.h"

namespace spl::tokenizer {

// Puts a space in front of each token except the first: "a", "b" → "a", " b".
class JoinWithSpaces final : public DecodeStep {
 public:
  absl::Status Push(std::string token, std::vector<std::string>* out) override;
  absl::Status Finish(std::vector<std::string>* out) override;

 private:
  bool first_ = true;
};

// Joins the fragments of one token, and passes it on at the end.
class HoldAll final : public DecodeStep {
 public:
  absl::Status Push(std::string token, std::vector<std::string>* out) override;
  absl::Status Finish(std::vector<std::string>* out) override;

 private:
  std::string held_;
};

// Turns byte-level characters into text; a token with any other character stands for its own bytes. Holds back an
// incomplete character, at most 3 bytes.
class BytesFromChars final : public DecodeStep {
 public:
  absl::Status Push(std::string token, std::vector<std::string>* out) override;
  absl::Status Finish(std::vector<std::string>* out) override;

 private:
  std::string pending_;
};

// Turns runs of "<0x..>" tokens into text. One bad byte makes every byte of its run U+FFFD (the reference's rule), so
// that a run is held back until it ends.
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

// StripToken removes up to `start` leading and `stop` trailing copies of `content` from each token.
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

// Does the same to the one token that all tokens were joined into; holds back what may be its end.
class StripFused final : public DecodeStep {
 public:
  explicit StripFused(StripOptions options);
  absl::Status Push(std::string token, std::vector<std::string>* out) override;
  absl::Status Finish(std::vector<std::string>* out) override;

 private:
  StripOptions options_;
  size_t num_to_strip_;  // leading copies that may still be removed
  std::string pending_;
};

// Turns Metaspace characters back into spaces. Drops those in front of the first token if encoding put them there.
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
