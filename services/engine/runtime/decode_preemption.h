// Makes room when a decode engine's page pool runs out: the youngest sequence gives way until there is room again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/model/model.h"
#include "services/engine/runtime/decode_batch.h"
#include "services/engine/runtime/shared_pool.h"

namespace spl::engine {

// In a pool that is shared with a prefill engine cached KV goes first. Then the pages of sequences move to host memory,
// and back (ParkedPages). One that gives way keeps its age, waits in front
// of all younger ones, and goes on with the same tokens. Engine thread.
class DecodePreemption {
 public:
  // All outlive it. `parked_bytes` of host memory are used at most. `shared` may be null: nothing is cached in the
  // pool.
  DecodePreemption(const Model& model, PagePool& pool, SharedPool* shared, DecodeBatch& batch, size_t parked_bytes);

  // Takes room for the next position of every active continuation of the batch. False: no pages are free for all.
  bool Grow();
  // Every active continuation of the batch gets room for its next position; the youngest sequences give way when the
  // pool is full. Those that gave way wait, or have ended with Unavailable where no host memory is left for them.
  // REQUIRES: no step is under way.
  void GrowOrPreempt();
  // Has cached KV evicted until the pool has pages for a sequence that waits to go on. False: not enough is cached.
  bool EvictCachedFor(const DecodeSequence& sequence);
  // A sequence that has pages gives them up, the youngest first, so that `needy` may have them; `needy` itself where
  // nobody is younger, if it runs. False: nobody is left to ask.
  bool FindRoomFor(DecodeSequence& needy);
  // Whether nobody else has pages of the pool.
  bool IsAlone(const DecodeSequence& sequence) const;
  // Takes the pages back that a sequence gave up, where there is room for its next position, too. ResourceExhausted:
  // there is not, and the sequence is as it was. REQUIRES: it gave way.
  absl::Status Return(DecodeSequence& sequence);
  // Counts a sequence that ends because the pool is too small for it alone; the status that it ends with.
  absl::Status TooSmall();

  uint64_t num_preemptions() const { return num_preemptions_; }  // that gave way, or ended because they could not

 private:
  bool MakeRoom(int64_t num_pages) { return shared_ != nullptr && shared_->MakeRoom(num_pages); }
  // At most: its own where it gave way, and those of its start or its next step.
  int64_t PagesToGoOn(const DecodeSequence& sequence) const;
  void Park(DecodeSequence& sequence);

  const Model& model_;
  PagePool& pool_;
  SharedPool* const shared_;
  DecodeBatch& batch_;
  const size_t parked_bytes_max_;
  const int64_t streams_of_rank_;
  uint64_t num_preemptions_ = 0;
};

}  // namespace spl::engine
