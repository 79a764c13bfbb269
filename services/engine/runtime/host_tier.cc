#include "services/engine/runtime/host_tier.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "services/base/status.h"
#include "services/engine/runtime/local_generator.h"

namespace spl::engine {
namespace {

using kernels::kPageTokens;

constexpr int64_t kTokensUntilRetry = 64;  // a sequence that found no room waits so long

}  // namespace

absl::StatusOr<std::unique_ptr<HostTier>> HostTier::Create(const Model& model, PagePool& pool,
                                                           std::function<bool(int64_t)> make_room,
                                                           const HostTierOptions& options) {
  SPLICE_ASSIGN_OR_RETURN(auto host, HostKv::Create(model, options.bytes));
  return std::unique_ptr<HostTier>(new HostTier(model, pool, std::move(make_room), options, std::move(host)));
}

std::optional<int32_t> HostTier::SlotsOf(const DecodeSequence& sequence) const {
  if (sequence.done || sequence.parked != nullptr || sequence.forks.size() != 1) return std::nullopt;
  const DecodeFork& fork = sequence.forks[0];
  // It may have to attend to everything, which must be in the pool then.
  if (fork.finished || fork.watched != nullptr || fork.guard != nullptr || fork.stopped_choosing) return std::nullopt;
  if (fork.kv->classes() != nullptr || fork.kv->kept() != nullptr) return std::nullopt;
  const TokenSelector& selector = *fork.selector;
  const ScoringPlan plan = selector.scoring();
  if (plan.scoring != TokenScoring::kPackedKeys || selector.is_exact() || fork.selector->adaptive() != nullptr ||
      selector.outer() != nullptr || plan.budget > kernels::kHotBudgetMax)
    return std::nullopt;
  const int32_t wanted = std::max(options_.hot_tokens > 0 ? options_.hot_tokens : 2 * plan.budget, plan.budget);
  const int32_t slots = PagesFor(wanted) * kPageTokens;
  if (slots > kernels::kHotSlotsMax) return std::nullopt;
  return slots;
}

std::optional<HostTier::Work> HostTier::NextOf(const DecodeSequence& sequence) const {
  const std::optional<int32_t> slots = SlotsOf(sequence);
  if (!slots.has_value()) return std::nullopt;
  const DecodeFork& fork = sequence.forks[0];
  const int64_t num_tokens = fork.kv->num_tokens();
  const ScoringPlan plan = fork.selector->scoring();
  // The step before this one has chosen.
  if (fork.num_output < 2 || num_tokens <= 2 * int64_t{plan.budget} || num_tokens < 2 * int64_t{*slots} ||
      num_tokens < fork.next_move)
    return std::nullopt;
  const auto full = static_cast<int32_t>((num_tokens - plan.recent) / kPageTokens);
  const ModelConfig& config = model_.config();
  for (int32_t layer = plan.first_layer; layer < config.num_layers; ++layer) {
    Work work{.end = full};
    for (int32_t head = 0; head < config.num_kv_heads; ++head) {
      if (fork.selector->Chooses(layer, head)) work.streams.push_back(layer * config.num_kv_heads + head);
    }
    if (work.streams.empty()) continue;
    const int32_t moved = fork.hot == nullptr ? 0 : fork.hot->moved(work.streams[0]);
    if (moved == 0 ? full > *slots / kPageTokens : full >= moved + options_.pages_at_once) return work;
  }
  return std::nullopt;
}

bool HostTier::HasWork(const DecodeBatch& batch) const {
  const auto& running = batch.running();
  return std::any_of(running.begin(), running.end(),
                     [&](const auto& sequence) { return NextOf(*sequence).has_value(); });
}

void HostTier::MoveSome(DecodeBatch& batch) {
  size_t left = options_.moved_bytes;
  for (const auto& sequence : batch.running()) {
    while (const std::optional<Work> work = NextOf(*sequence)) {
      const size_t bytes = work->streams.size() * static_cast<size_t>(work->end) * pool_.view().page_bytes();
      if (bytes > left && left < options_.moved_bytes) return;
      left -= std::min(left, bytes);
      const absl::Status status = Move(*sequence, *work);
      if (status.code() == absl::StatusCode::kResourceExhausted) {
        sequence->forks[0].next_move = sequence->forks[0].kv->num_tokens() + kTokensUntilRetry;
      } else if (!status.ok()) {
        batch.Finish(*sequence, Errorf(absl::StatusCode::kInternal, "moving KV to the host: {}", MessageOf(status)));
      }
    }
    if (!sequence->done && !sequence->forks.empty()) WaitForMore(sequence->forks[0]);
  }
}

// Moved sequences need not be looked at before enough pages are full again.
void HostTier::WaitForMore(DecodeFork& fork) const {
  if (fork.hot == nullptr) return;
  int32_t least = std::numeric_limits<int32_t>::max();
  for (int32_t stream = 0; stream < fork.kv->shape().num_streams(); ++stream) {
    if (fork.hot->moved(stream) > 0) least = std::min(least, fork.hot->moved(stream));
  }
  if (least == std::numeric_limits<int32_t>::max()) return;
  const int64_t full = (int64_t{least} + options_.pages_at_once) * kPageTokens + fork.selector->scoring().recent;
  fork.next_move = std::max(fork.next_move, full);
}

absl::Status HostTier::Move(DecodeSequence& sequence, const Work& work) {
  DecodeFork& fork = sequence.forks[0];
  const KvShape shape = KvShapeOf(model_.config());
  if (fork.hot == nullptr) {
    const int64_t max_tokens = sequence.request.sampling.max_tokens, positions = model_.config().max_positions;
    const int64_t left = max_tokens == 0 ? positions : std::max<int64_t>(max_tokens - fork.num_output, 0);
    const int64_t most = std::min(fork.kv->num_tokens() + left, positions);
    auto hot =
        HotBuffer::Create(pool_, *host_, shape,
                          {.num_slots = *SlotsOf(sequence),
                           .max_tokens = std::max<int64_t>(most, fork.kv->capacity()) + 2 * int64_t{kPageTokens}},
                          model_.backends());
    // Tables that no device has room for are no reason to end.
    if (hot.status().code() == absl::StatusCode::kUnavailable)
      return absl::ResourceExhaustedError(MessageOf(hot.status()));
    if (!hot.ok()) return hot.status();
    fork.hot = *std::move(hot);
  }
  absl::Status status = fork.hot->Move(*fork.kv, work.streams, work.end);
  if (status.code() != absl::StatusCode::kResourceExhausted || !make_room_) return status;
  // It may be the slots that are missing.
  const int64_t pages = fork.hot->slot_pages() * static_cast<int64_t>(work.streams.size());
  if (pool_.num_free() >= pages || !make_room_(pages)) return status;
  return fork.hot->Move(*fork.kv, work.streams, work.end);
}

}  // namespace spl::engine
