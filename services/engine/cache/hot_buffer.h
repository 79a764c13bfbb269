// The part of a sequence's KV that is in host memory, and its hot buffer on the device
// (docs/decisions/0019-host-tier.md, kernels/common/hot_rows.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend/backend.h"
#include "kernels/common/hot_rows.h"
#include "services/engine/cache/host_kv.h"
#include "services/engine/cache/sequence_kv.h"

namespace spl::engine {

// Owns the host pages, the pages of the pool that slots lie in, and the tables on the devices. One thread at a time, of
// which no step of the sequence runs meanwhile.
class HotBuffer {
 public:
  struct Shape {
    int32_t num_slots = 0;   // slots a stream: a multiple of 64, at most kHotSlotsMax
    int64_t max_tokens = 0;  // most positions that the sequence will have
  };
  // Allocates the tables: for each stream 136 bytes a page of the sequence and 8 a slot. `host`, `pool` and `backends`
  // ([num_ranks]) outlive it. Unavailable, ResourceExhausted: a device has no memory for them.
  static absl::StatusOr<std::unique_ptr<HotBuffer>> Create(PagePool& pool, HostKv& host, const KvShape& kv_shape,
                                                           const Shape& shape,
                                                           std::span<const kernels::Backend* const> backends);
  ~HotBuffer();
  HotBuffer(const HotBuffer&) = delete;
  HotBuffer& operator=(const HotBuffer&) = delete;

  // Moves pages [moved(stream), end) of each stream to host memory. The streams, of one layer, have moved equally much.
  // The first move also takes the slots: the stream's first pages if the sequence is their only owner, or else pages of
  // the pool. The others go back to the pool. ResourceExhausted: the host, or the pool, has no pages; nothing has
  // changed. After another error the sequence must end. REQUIRES: these pages are full, and `end` pages are at least
  // the slots.
  absl::Status Move(SequenceKv& kv, std::span<const int32_t> streams, int32_t end);
  int32_t moved(int32_t stream) const { return moved_[static_cast<size_t>(stream)]; }  // leading pages
  // Pages that Move takes from the pool beside those of the sequence if it is not their only owner.
  int64_t slot_pages() const { return shape_.num_slots / kernels::kPageTokens; }

  kernels::HotRows rows(int rank) const;
  // [num_streams] pages of the pool that the slots of each stream lie in; empty before its first move.
  std::span<const std::vector<int32_t>> tables() const { return slots_; }
  // Like SequenceKv's: Evict gives the pages of slots back, Refill gets others in their place, with the same contents.
  // After an error of Refill the sequence must end.
  void Evict();
  absl::Status Refill(const std::unordered_map<int32_t, int32_t>& pages);

  // Adds what was counted since the last call to the totals of the host memory. Errors are those of copies.
  absl::Status ReadCounts();

 private:
  HotBuffer(PagePool& pool, HostKv& host, const KvShape& kv_shape, const Shape& shape,
            std::span<const kernels::Backend* const> backends);
  // Where the tables of a rank lie in its memory, in bytes.
  struct Places {
    size_t counts, host_pages, slot_pages, position_of, listed_at, slot_of, end;
  };
  struct Taken;  // pages of a move
  absl::Status TakePages(const SequenceKv& kv, std::span<const int32_t> streams, int32_t end, Taken& taken);
  void PutBack(const Taken& taken);
  int rank_of(int32_t stream) const;
  int64_t on_rank(int32_t stream) const;  // number of the stream among those of its rank
  std::byte* table(int rank, size_t at) const { return static_cast<std::byte*>(memory_[rank]->data()) + at; }
  absl::Status UploadSlots(int32_t stream);

  PagePool& pool_;
  HostKv& host_;
  const KvShape kv_shape_;
  const Shape shape_;
  const int32_t max_pages_;
  const std::vector<const kernels::Backend*> backends_;
  const int32_t heads_of_rank_;
  Places places_{};
  std::vector<std::unique_ptr<kernels::Buffer>> memory_;  // [num_ranks]
  std::vector<int32_t> moved_;                            // [num_streams]
  std::vector<std::vector<int32_t>> slots_;               // [num_streams]
  std::vector<int32_t> host_pages_;                       // all of them
  std::vector<HostKv::Counts> counted_;                   // [num_ranks]: at the last ReadCounts
  bool evicted_ = false;
};

}  // namespace spl::engine
