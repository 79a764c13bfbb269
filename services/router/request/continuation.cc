#include "services/router/request/continuation.h"

#include <utility>

#include "services/base/status.h"

namespace spl::router {

Continuation::Continuation(const tokenizer::Tokenizer& tokenizer, const GenerationRequest& request,
                           uint32_t model_vocab_size)
    : tokenizer_vocab_size_(tokenizer.vocab_size()),
      model_vocab_size_(model_vocab_size),
      shows_end_token_(request.echo && request.sampling.logprobs.has_value()),
      decoder_(tokenizer, {.skip_special_tokens = request.skip_special_tokens}),
      stops_(request.stop),
      matcher_(request.stop) {}

absl::StatusOr<std::string> Continuation::TextOf(TokenId id) {
  if (id >= tokenizer_vocab_size_ && id < model_vocab_size_) return std::string();
  return decoder_.Append(id);
}

absl::Status Continuation::Append(OutputToken token, FinishReason reason, Delta* delta) {
  if (finished_) return absl::OkStatus();
  std::string decoded;
  if (reason != FinishReason::kStop) {
    absl::StatusOr<std::string> piece = TextOf(token.id);
    if (!piece.ok()) {
      return Errorf(absl::StatusCode::kInternal, "a worker sampled token {}: {}", token.id, MessageOf(piece.status()));
    }
    decoded = *std::move(piece);
    const size_t begin = decoded_bytes_;
    pending_.push_back({std::move(token), begin, begin + decoded.size()});
  } else if (shows_end_token_) {
    pending_.push_back({std::move(token), decoded_bytes_, decoded_bytes_});
  }
  if (reason != FinishReason::kNone) decoded += decoder_.Finish();
  Show(decoded, delta);
  if (finished_ || reason == FinishReason::kNone) return absl::OkStatus();
  const std::string rest = matcher_.Finish();
  shown_bytes_ += rest.size();
  delta->text += rest;
  finished_ = true;
  delta->finish_reason = reason;
  ReleaseTokens(delta);
  return absl::OkStatus();
}

void Continuation::Show(const std::string& decoded, Delta* delta) {
  decoded_bytes_ += decoded.size();
  tokenizer::StopMatcher::Result result = matcher_.Append(decoded);
  shown_bytes_ += result.text.size();
  delta->text += result.text;
  if (result.stopped) {
    finished_ = true;
    stopped_by_string_ = true;
    delta->finish_reason = FinishReason::kStop;
    delta->stop_string = stops_[static_cast<size_t>(result.stop_idx)];
  }
  ReleaseTokens(delta);
}

// A token is shown once all of its text is; at a stop string also when only its first part is. Tokens that lie wholly
// in the stop string never are.
void Continuation::ReleaseTokens(Delta* delta) {
  while (!pending_.empty()) {
    Pending& next = pending_.front();
    const bool whole = next.end <= shown_bytes_;
    const bool cut = finished_ && next.begin < shown_bytes_;
    if (!whole && !cut) break;
    delta->tokens.push_back(std::move(next.token));
    pending_.pop_front();
  }
  if (finished_) pending_.clear();
}

}  // namespace spl::router
