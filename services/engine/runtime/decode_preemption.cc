#include "services/engine/runtime/decode_preemption.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "services/base/status.h"
#include "services/engine/methods/selection_methods.h"
#include "services/engine/runtime/decode_room.h"
#include "services/engine/runtime/local_generator.h"
#include "services/engine/selection/kept_positions.h"
#include "services/methods/methods.h"

namespace spl::engine {
namespace {

// [num_ranks]: pages of the pool that the sequence does not have.
std::vector<int64_t> PagesBeside(const DecodeSequence& sequence, const PagePool& pool) {
  std::vector<int64_t> beside(static_cast<size_t>(pool.view().num_ranks()), pool.view().pages_per_rank());
  if (sequence.parked != nullptr) return beside;
  const std::vector<int64_t> own = sequence.Holders().PagesByRank(pool);
  for (size_t r = 0; r < own.size(); ++r) beside[r] -= own[r];
  return beside;
}

}  // namespace

DecodePreemption::DecodePreemption(const Model& model, PagePool& pool, MakeRoom make_room, DecodeBatch& batch,
                                   size_t parked_bytes)
    : model_(model),
      pool_(pool),
      make_room_(std::move(make_room)),
      batch_(batch),
      parked_bytes_max_(parked_bytes),
      streams_of_rank_(KvShapeOf(model.config()).num_streams() / pool.view().num_ranks()) {}

bool DecodePreemption::Grow() {
  for (const auto& sequence : batch_.running()) {
    for (DecodeFork& fork : sequence->forks) {
      if (!fork.finished && !fork.EndsInFlight() && !fork.Grow().ok()) return false;
    }
  }
  return true;
}

void DecodePreemption::GrowOrPreempt() {
  auto& running = batch_.running();
  for (const auto& sequence : running) {
    for (DecodeFork& fork : sequence->forks) {
      while (sequence->runs() && !fork.finished && !fork.Grow().ok()) {
        if (EvictCached(fork.GrowthPages(KvShapeOf(model_.config()).num_streams())) && fork.Grow().ok()) break;
        // Alone in the pool it asks once more: others may have left it since.
        if (FindRoomFor(*sequence) || fork.Grow().ok() || !IsAlone(*sequence) || StopChoosing(*sequence)) continue;
        batch_.Finish(*sequence, TooSmall());
      }
    }
  }
  for (auto& sequence : running) {
    if (sequence->parked != nullptr && !sequence->done) batch_.Wait(std::move(sequence));
  }
  std::erase(running, nullptr);
  batch_.RemoveFinished();
}

bool DecodePreemption::EvictCachedFor(const DecodeSequence& sequence) { return EvictCached(PagesToGoOn(sequence)); }

int64_t DecodePreemption::PagesToGoOn(const DecodeSequence& sequence) const {
  int64_t pages = KvShapeOf(model_.config()).num_streams() * static_cast<int64_t>(sequence.num_rows());
  if (sequence.parked != nullptr) pages += static_cast<int64_t>(sequence.parked->bytes() / pool_.view().page_bytes());
  if (!sequence.started()) {
    // The pool counts as free what the fullest rank has, times the ranks.
    const std::vector<int64_t> of_rank = PagesToStart(sequence, model_, pool_);
    pages += *std::max_element(of_rank.begin(), of_rank.end()) * static_cast<int64_t>(of_rank.size());
  }
  return std::min(pages, pool_.num_pages());
}

bool DecodePreemption::FindRoomFor(DecodeSequence& needy) {
  auto& waiting = batch_.waiting();
  for (size_t i = waiting.size(); i-- > 0 && waiting[i]->order > needy.order;) {
    if (!waiting[i]->runs()) continue;
    Park(*waiting[i]);
    if (waiting[i]->done) waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
    return true;
  }
  auto& running = batch_.running();
  for (size_t i = running.size(); i-- > 0;) {
    DecodeSequence& youngest = *running[i];
    if (!youngest.runs()) continue;
    if (&youngest == &needy && IsAlone(needy)) return false;
    Park(youngest);
    return true;
  }
  return false;
}

// A method's pages come on top of the KV, for which alone a router has asked whether the prompt and its answer fit.
bool DecodePreemption::StopChoosing(DecodeSequence& sequence) {
  const int64_t free_before = pool_.num_free();
  DecodeOptions everything = sequence.request.decode;
  for (DecodeFork& fork : sequence.forks) {
    if (fork.finished || fork.compact == nullptr || fork.stopped_choosing || fork.hot != nullptr) continue;
    everything.selector = methods::ResolveSelector(methods::kAuto, fork.kv->classes() != nullptr);
    auto selector = MakeSelectorFor(*fork.kv, everything, model_);
    if (!selector.ok()) return false;
    if (!RefitCompactPages(model_, pool_, **selector, fork.kv->num_tokens(), fork.compact).ok()) return false;
    fork.selector = *std::move(selector);
    fork.guard.reset();
    fork.stopped_choosing = true;
  }
  return pool_.num_free() > free_before;
}

bool DecodePreemption::IsAlone(const DecodeSequence& sequence) const {
  return pool_.HasAvailable(PagesBeside(sequence, pool_));
}

bool DecodePreemption::EvictCachedBeside(const DecodeSequence& sequence) {
  const std::vector<int64_t> beside = PagesBeside(sequence, pool_);
  return EvictCached(*std::min_element(beside.begin(), beside.end()) * static_cast<int64_t>(beside.size()));
}

void DecodePreemption::Park(DecodeSequence& sequence) {
  ++num_preemptions_;
  sequence.DropChoice();
  const PageHolders holders = sequence.Holders();
  const size_t bytes = holders.Pages(pool_).size() * pool_.view().page_bytes();
  absl::Status status;
  if (batch_.counts().parked_bytes + bytes > parked_bytes_max_) {
    status = absl::ResourceExhaustedError("no host memory for its KV is left");
  } else if (auto parked = ParkedPages::Park(pool_, holders); parked.ok()) {
    sequence.parked = *std::move(parked);
    return;
  } else {
    status = parked.status();
  }
  batch_.Finish(sequence, Errorf(absl::StatusCode::kUnavailable,
                                 "preempted: the decode worker's KV pool is full, and {}", MessageOf(status)));
}

absl::Status DecodePreemption::Return(DecodeSequence& sequence) {
  std::vector<int64_t> spare(pool_.view().num_ranks());
  // Alone it returns without: whether it can grow is seen when it does.
  for (const DecodeFork& fork : sequence.forks) {
    if (fork.finished || IsAlone(sequence)) continue;
    for (int64_t& pages : spare) pages += fork.GrowthPages(streams_of_rank_);
  }
  SPLICE_RETURN_IF_ERROR(sequence.parked->Return(sequence.Holders(), spare));
  sequence.parked.reset();
  return absl::OkStatus();
}

absl::Status DecodePreemption::TooSmall() {
  ++num_preemptions_;
  return absl::UnavailableError("preempted: the decode worker's KV pool is too small for this sequence");
}

}  // namespace spl::engine
