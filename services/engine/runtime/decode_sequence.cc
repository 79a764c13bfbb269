#include "services/engine/runtime/decode_sequence.h"

#include <utility>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/runtime/local_generator.h"

namespace spl::engine {
namespace {

absl::Status CheckTokens(const DecodeRequest& request, const ModelConfig& config) {
  SPLICE_RETURN_IF_ERROR(ValidateTokens(request.prompt, config, "prompt token"));
  SPLICE_RETURN_IF_ERROR(ValidateTokens(request.left_prompt, config, "prompt token"));
  SPLICE_RETURN_IF_ERROR(ValidateTokens(request.prior_output, config, "token of earlier output"));
  for (const SampledToken& first : request.first_tokens)
    SPLICE_RETURN_IF_ERROR(ValidateTokens({&first.token, 1}, config, "first token"));
  return ValidateTokens(request.replay, config, "token to replay");
}

}  // namespace

int64_t DecodeFork::GrowthPages(int64_t streams) const {
  const int64_t next = num_positions() + 1;
  const bool compact_grows =
      compact != nullptr && compact->needs().page_tokens > 0 && (next - 1) % compact->needs().page_tokens == 0;
  return (next > kv->capacity() ? streams : 0) + (compact_grows ? streams : 0);
}

absl::Status DecodeFork::Grow() {
  const int64_t next = num_positions() + 1;
  SPLICE_RETURN_IF_ERROR(kv->Reserve(next));
  return compact == nullptr ? absl::OkStatus() : compact->Reserve(next);
}

void DecodeFork::Free() {
  SPLICE_CHECK(in_flight == 0, "the device writes to these pages");
  // Counts that cannot be read any more are not worth an error: the device is lost, which everybody will hear of.
  if (hot != nullptr) (void)hot->ReadCounts();
  hot.reset();
  kv.reset();
  compact.reset();
}

absl::StatusOr<std::unique_ptr<DecodeSequence>> DecodeSequence::Make(DecodeRequest request, const Model& model,
                                                                     int32_t max_rows) {
  const ModelConfig& config = model.config();
  SPLICE_RETURN_IF_ERROR(ValidateSampling(request.sampling, config.vocab_size));
  SPLICE_RETURN_IF_ERROR(CheckTokens(request, config));
  if (!request.replay.empty() && (request.sampling.num_forks != 1 || !request.prior_output.empty()))
    return InvalidArgument("{} tokens to replay for n = {} with {} tokens of earlier output", request.replay.size(),
                           request.sampling.num_forks, request.prior_output.size());
  // The first one is the first token of the answer.
  if (!request.replay.empty()) request.first_tokens = {{.token = request.replay[0]}};
  if (request.first_tokens.size() != static_cast<size_t>(request.sampling.num_forks))
    return InvalidArgument("{} first tokens for n = {}", request.first_tokens.size(), request.sampling.num_forks);
  if (request.sampling.num_forks > max_rows)
    return InvalidArgument("n is {}, the decode worker runs {} continuations at once", request.sampling.num_forks,
                           max_rows);
  SPLICE_ASSIGN_OR_RETURN(const auto selector, MakeSelectorFor(*request.kv, request.decode, model));
  auto sequence = std::make_unique<DecodeSequence>();
  const TokenScoring scoring = selector->scoring().scoring;
  sequence->gathers_keys =
      selector->outer() == nullptr && (scoring == TokenScoring::kCompactKeys || scoring == TokenScoring::kPackedKeys ||
                                       scoring == TokenScoring::kPageBounds);
  sequence->steps_are_alone = !CompactNeedsOf(*selector, model, request.kv->num_tokens()).has_value();
  sequence->chooses_by_prompt =
      selector->of_prompt() != nullptr &&
      std::any_of(request.first_tokens.begin(), request.first_tokens.end(),
                  [](const SampledToken& first) { return first.finish == FinishReason::kNone; });
  sequence->listener =
      std::make_unique<DecodeListener>(DecodeListener{std::move(request.on_tokens), std::move(request.on_done)});
  sequence->request = std::move(request);
  return sequence;
}

void DecodeSequence::DropChoice() {
  choice.reset();
  chooser.reset();
}

void DecodeSequence::OfferPages(const SequenceKv* kv) {
  if (kv == nullptr || parked != nullptr || kv->is_moved() || !request.on_pages_back) return;
  std::exchange(request.on_pages_back, nullptr)(*kv);
}

void DecodeSequence::Free(DecodeFork& fork) {
  OfferPages(fork.kv.get());
  fork.Free();
}

void DecodeSequence::End(const absl::Status& status, TokenDelivery& delivery) {
  done = true;
  OfferPages(request.kv.get());
  for (const DecodeFork& fork : forks) OfferPages(fork.kv.get());
  parked.reset();
  DropChoice();
  request.kv.reset();
  request.compact.reset();
  for (DecodeFork& fork : forks) {
    fork.finished = true;
    fork.Free();
  }
  delivery.AddEnd(std::move(listener), status);
}

PageHolders DecodeSequence::Holders() const {
  PageHolders holders{{request.kv.get()}, {request.compact.get()}};
  for (const DecodeFork& fork : forks) {
    holders.kv.push_back(fork.kv.get());
    holders.compact.push_back(fork.compact.get());
    holders.hot.push_back(fork.hot.get());
  }
  return holders;
}

}  // namespace spl::engine
