// One continuation of a prompt on its way from token ids to text: detokenizing, stop strings, and which tokens may be
// shown yet.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/router/request/request.h"

namespace spl::router {

// One thread at a time; borrows the tokenizer.
class Continuation {
 public:
  // Ids that the model's vocabulary has and the tokenizer's has not (padding rows of the embedding, or a model without
  // a tokenizer) are tokens without text; 0: the tokenizer's vocabulary is the model's.
  Continuation(const tokenizer::Tokenizer& tokenizer, const GenerationRequest& request, uint32_t model_vocab_size = 0);

  // Takes the next sampled token and appends what may be shown to `delta` (text, tokens, and the finish reason when
  // this was the end). `reason` is the worker's: kStop means that the token itself is an end token and no text.
  // Tokens after the end are ignored. Internal: the id is not in the vocabulary.
  absl::Status Append(OutputToken token, FinishReason reason, Delta* delta);

  bool finished() const { return finished_; }
  bool stopped_by_string() const { return stopped_by_string_; }  // the worker does not know that it is over

 private:
  struct Pending {
    OutputToken token;
    size_t begin;  // of its text, in bytes of the decoded text
    size_t end;
  };

  void Show(const std::string& decoded, Delta* delta);
  void ReleaseTokens(Delta* delta);

  absl::StatusOr<std::string> TextOf(TokenId id);

  const int64_t tokenizer_vocab_size_;
  const int64_t model_vocab_size_;
  tokenizer::StreamDecoder decoder_;
  tokenizer::StopMatcher matcher_;
  std::deque<Pending> pending_;  // at most as many as the longest stop string has bytes, plus one character's
  size_t decoded_bytes_ = 0;
  size_t shown_bytes_ = 0;
  bool finished_ = false;
  bool stopped_by_string_ = false;
};

}  // namespace spl::router
