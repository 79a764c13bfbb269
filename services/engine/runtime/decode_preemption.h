// Preempts sequences when a decode engine's page pool runs out: the youngest first, until there is room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/model/model.h"
#include "services/engine/runtime/decode_batch.h"

namespace spl::engine {

// Cached KV in the pool is evicted first. Then pages (blocks) of sequences move to
// host memory, and later back (ParkedPages). A preempted sequence keeps its age, waits before all younger ones, and
// continues with the same tokens. Engine thread.
class DecodePreemption {
 public:
  // Evicts cached KV until that many pages are free; false: not enough is cached.
  using MakeRoom = std::function<bool(int64_t num_pages)>;
  // All outlive it. `parked_bytes`: most host memory for preempted KV. `make_room` may be null: the pool has no cached
  // KV.
  DecodePreemption(const Model& model, PagePool& pool, MakeRoom make_room, DecodeBatch& batch, size_t parked_bytes);

  // Takes pages for the next position of every active continuation of the batch. False: there are not enough free
  // pages.
  bool Grow();
  // Takes pages for the next position of every active continuation of the batch. If the pool is full, preempts the
  // youngest sequences. Preempted sequences are in the waiting queue afterwards, or have ended with Unavailable if no
  // host memory is left. A sequence that is alone gives up choosing tokens before it ends. REQUIRES: no step is under
  // way.
  void GrowOrPreempt();
  // Evicts cached KV until the pool has pages for a waiting sequence. False: not enough is cached.
  bool EvictCachedFor(const DecodeSequence& sequence);
  // Preempts one sequence that has pages, the youngest first, to make room for `needy`. If `needy` is running and the
  // youngest, it is preempted itself. False: there is no sequence to preempt.
  bool FindRoomFor(DecodeSequence& needy);
  // Whether no other sequence or reservation has pages of the pool. Caches may have some.
  bool IsAlone(const DecodeSequence& sequence) const;
  // Evicts all cached KV, so that a sequence that is alone has the whole pool. False: some of it stays.
  bool EvictCachedBeside(const DecodeSequence& sequence);
  // Brings the pages of a preempted sequence back, if there is also room for its next position. ResourceExhausted:
  // there is not; the sequence is unchanged. REQUIRES: it is preempted.
  absl::Status Return(DecodeSequence& sequence);
  // Counts a sequence that ends because the pool is too small for it alone. Returns the status to end it with.
  absl::Status TooSmall();

  uint64_t num_preemptions() const { return num_preemptions_; }  // preempted, or ended because they could not be

 private:
  bool EvictCached(int64_t num_pages) { return make_room_ && make_room_(num_pages); }
  // Upper bound of the pages that it needs to continue: its own if it was preempted, and those of its start or next
  // step.
  int64_t PagesToGoOn(const DecodeSequence& sequence) const;
  void Park(DecodeSequence& sequence);
  // Gives up the pages beside the KV of all continuations, which attend to everything from the next step on. False:
  // there are none, or what is left needs as many.
  bool StopChoosing(DecodeSequence& sequence);

  const Model& model_;
  PagePool& pool_;
  const MakeRoom make_room_;
  DecodeBatch& batch_;
  const size_t parked_bytes_max_;
  const int64_t streams_of_rank_;
  uint64_t num_preemptions_ = 0;
};

}  // namespace spl::engine
