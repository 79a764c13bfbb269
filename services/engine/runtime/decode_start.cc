#include "services/engine/runtime/decode_start.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "services/base/check.h"
#include "services/base/status.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/runtime/decode_room.h"
#include "services/engine/runtime/local_generator.h"

namespace spl::engine {

absl::Status DecodeStart::RunSlice(DecodeSequence& sequence) {
  return sequence.has_to_choose() ? ChooseSlice(sequence) : ReplaySlice(sequence);
}

absl::Status DecodeStart::ReplaySlice(DecodeSequence& sequence) {
  DecodeRequest& request = sequence.request;
  SPLICE_ASSIGN_OR_RETURN(const auto selector, MakeSelectorFor(*request.kv, request.decode, model_));
  const auto rows_max = static_cast<size_t>(executor_.max_rows());
  const size_t num_rows = std::min(request.replay.size() - 1, rows_max);  // the last one is the next step's
  const int64_t begin = request.kv->num_tokens(), end = begin + static_cast<int64_t>(num_rows);
  SPLICE_RETURN_IF_ERROR(request.kv->Reserve(end));
  std::vector<DecodeRow> rows;
  for (size_t i = 0; i < num_rows; ++i)
    rows.push_back({.token = request.replay[i],
                    .kv = request.kv.get(),
                    .selector = selector.get(),
                    .at = begin + static_cast<int64_t>(i)});
  SPLICE_RETURN_IF_ERROR(executor_.Decode(rows));
  request.kv->set_num_tokens(end);
  const auto ran = request.replay.begin() + static_cast<std::ptrdiff_t>(num_rows);
  request.prior_output.insert(request.prior_output.end(), request.replay.begin(), ran);
  request.replay.erase(request.replay.begin(), ran);
  request.first_tokens[0].token = request.replay[0];
  return absl::OkStatus();
}

absl::Status DecodeStart::ChooseSlice(DecodeSequence& sequence) {
  const auto choose = [&]() -> absl::Status {
    if (sequence.choice == nullptr) {
      SPLICE_ASSIGN_OR_RETURN(sequence.chooser, MakeSelectorFor(*sequence.request.kv, sequence.request.decode, model_));
      SPLICE_ASSIGN_OR_RETURN(sequence.choice, PromptChoice::Begin(executor_, sequence.tokens(), *sequence.request.kv,
                                                                   *sequence.chooser->of_prompt()));
    }
    if (!sequence.choice->done()) SPLICE_RETURN_IF_ERROR(sequence.choice->RunSlice());
    return absl::OkStatus();
  };
  const absl::Status status = choose();
  if (status.ok() && !sequence.choice->done()) return status;
  if (status.ok()) sequence.of_prompt = sequence.choice->Take();
  sequence.DropChoice();
  return status;
}

bool DecodeStart::HasRoom(const DecodeSequence& sequence) const {
  return pool_.HasFree(PagesToStart(sequence, model_, pool_));
}

absl::Status DecodeStart::Start(DecodeSequence& sequence) {
  const absl::Status status = MakeForks(sequence);
  if (status.ok()) {
    sequence.request.kv.reset();
    sequence.of_prompt.reset();
  } else {
    sequence.forks.clear();
  }
  return status;
}

// The forks share the prompt's full pages. The last one takes the sequence's own KV, once nothing can fail any more.
absl::Status DecodeStart::MakeForks(DecodeSequence& sequence) {
  DecodeRequest& request = sequence.request;
  const int32_t n = request.sampling.num_forks;
  for (int32_t i = 0; i < n; ++i) {
    DecodeFork fork{.index = i};
    const SampledToken& first = request.first_tokens[i];
    fork.last_token = first.token;
    if (!request.replay.empty()) fork.replay.assign(request.replay.begin() + 1, request.replay.end());
    fork.finished = first.finish != FinishReason::kNone;
    if (!fork.finished) SPLICE_RETURN_IF_ERROR(MakeFork(sequence, fork));
    sequence.forks.push_back(std::move(fork));
  }
  return absl::OkStatus();
}

// Gives a fork all that it decodes with.
absl::Status DecodeStart::MakeFork(DecodeSequence& sequence, DecodeFork& fork) {
  DecodeRequest& request = sequence.request;
  const ModelConfig& config = model_.config();
  const int64_t num_tokens = request.kv->num_tokens();
  const int64_t num_prompt = num_tokens - static_cast<int64_t>(request.prior_output.size());
  SPLICE_ASSIGN_OR_RETURN(fork.selector, MakeSelectorFor(*request.kv, request.decode, model_));
  SPLICE_RETURN_IF_ERROR(TakeCompactPages(sequence, fork));
  fork.sampler = std::make_unique<Sampler>(request.sampling, config.eos_ids, fork.index, request.prompt,
                                           request.prior_output, num_prompt, config.max_positions);
  fork.sampler->Accept(fork.last_token);
  if (const AdaptiveSelector* const adaptive = fork.selector->adaptive();
      adaptive != nullptr && adaptive->mass_floor() > 0) {
    std::unique_ptr<TokenSelector> everything;
    if (!MassGuard::Estimates(fork.selector->scoring())) {
      SPLICE_ASSIGN_OR_RETURN(everything, MakeTokenSelector("", config, request.kv->classes()));
    }
    fork.guard = std::make_unique<MassGuard>(config, std::move(everything));
  }
  // A comparison cannot attend to what was left out.
  if (request.kv->kept() == nullptr) fork.watched = fidelity_.Draw(*fork.selector, request.kv->classes());
  if (fork.index + 1 < request.sampling.num_forks) {
    SPLICE_ASSIGN_OR_RETURN(fork.kv, request.kv->Fork());
  } else {
    fork.kv = std::move(request.kv);
  }
  return absl::OkStatus();
}

// Turns what was reserved into what the first fork needs: heads may have been restored and tokens left out since. Fills
// what is known of the prompt.
absl::Status DecodeStart::TakeCompactPages(DecodeSequence& sequence, DecodeFork& fork) {
  DecodeRequest& request = sequence.request;
  const int64_t num_tokens = request.kv->num_tokens();
  fork.compact = std::move(request.compact);
  SPLICE_RETURN_IF_ERROR(RefitCompactPages(model_, pool_, *fork.selector, num_tokens, fork.compact));
  PromptSelector* const selector = fork.selector->of_prompt();
  if (selector == nullptr) return absl::OkStatus();
  SPLICE_RETURN_IF_ERROR(fork.compact->Reserve(num_tokens + 1));
  return KeepPositions(model_, pool_, *sequence.of_prompt, num_tokens, *selector, *fork.compact);
}

}  // namespace spl::engine
