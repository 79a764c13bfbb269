// Turns the token ids of one continuation into text: detokenizes, finds stop strings, and holds back text that may not
// be shown yet.
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
  // Ids in the model's vocabulary but not in the tokenizer's are tokens without text (padding rows of the embedding, or
  // a model without a tokenizer). `model_vocab_size` 0: both vocabularies are the same.
  Continuation(const tokenizer::Tokenizer& tokenizer, const GenerationRequest& request, uint32_t model_vocab_size = 0);

  // Takes the next sampled token. Appends the text and tokens that may be shown to `delta`, and the finish reason if
  // this was the end. `reason` is the worker's: kStop means that the token itself is an end token without text, which
  // is shown only beside the log-probabilities of an echoed prompt: who scores a text cuts off the last token. Tokens
  // after the end are ignored. Internal: the id is not in the vocabulary.
  absl::Status Append(OutputToken token, FinishReason reason, Delta* delta);

  bool finished() const { return finished_; }
  bool stopped_by_string() const { return stopped_by_string_; }  // the worker does not know that it has ended

 private:
  struct Pending {
    OutputToken token;
    size_t begin;  // start of the token's text, in bytes of the decoded text
    size_t end;
  };

  void Show(const std::string& decoded, Delta* delta);
  void ReleaseTokens(Delta* delta);

  absl::StatusOr<std::string> TextOf(TokenId id);

  const int64_t tokenizer_vocab_size_;
  const int64_t model_vocab_size_;
  const bool shows_end_token_;
  tokenizer::StreamDecoder decoder_;
  const std::vector<std::string> stops_;
  tokenizer::StopMatcher matcher_;
  std::deque<Pending> pending_;  // at most the bytes of the longest stop string, plus one character's
  size_t decoded_bytes_ = 0;
  size_t shown_bytes_ = 0;
  bool finished_ = false;
  bool stopped_by_string_ = false;
};

}  // namespace spl::router
