// The start of a prompt that arrives from the chunk store, perhaps while the prompt is computed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "services/chunk/chunk.h"
#include "services/engine/cache/sequence_kv.h"
#include "services/engine/model/model.h"
#include "services/engine/model/position_ranges.h"

namespace spl::engine {

// Chunks [first, end) of a prompt whose earlier chunks are in its pages. One thread lands chunks without a gap, and
// another one takes chunks from `first` on to compute them: every chunk is written by one of the two. A chunk lands in
// host memory of this object and is copied when it is complete, so that a fetch that is too late never writes into
// pages that are in use, and nobody waits for its end.
//
// Backwards: the last chunk first. The two then meet somewhere, wherever that is, and neither does work that the other
// has done ("compute or load", from both ends; docs/decisions/0017). Late chunks are also the dear ones to compute.
class IncomingPrefix {
 public:
  enum class Order : uint8_t { kForwards, kBackwards };

  // `kv` has pages for all of the chunks.
  IncomingPrefix(const Model& model, std::shared_ptr<SequenceKv> kv, int32_t first)
      : model_(model), kv_(std::move(kv)), first_(first), end_(first), front_(first) {}

  // --- the thread that lands ---
  // Once, before the first chunk: how many are coming.
  void Expect(int32_t num_chunks, Order order);
  // Keys in the order in which they must be fetched. `keys`: those of chunks [first, end).
  std::vector<chunk::ChunkKey> InOrder(std::span<const chunk::ChunkKey> keys) const;
  // A place for the index-th chunk of that order; none: nobody wants it any more, or it is of another model or
  // position.
  chunk::Pieces PlaceFor(size_t index, const chunk::ChunkHeader& header);
  // Copies it into the pages. False: nobody wants it any more.
  bool Land(size_t index, const chunk::ChunkHeader& header);

  // --- the thread that computes ---
  // Takes positions [from, from + rows) to compute them, or as many of them as have not landed, and returns their end.
  // `from` where all of the rest has landed. REQUIRES: rows > 0.
  int64_t Take(int64_t from, int64_t rows);
  // The positions that have landed by now, in whole chunks, and will not be taken: their pages are final.
  PositionRange Landed() const;
  // Returns the positions that have landed, in whole chunks. Nothing lands afterwards, and the pages are let go.
  // Idempotent.
  PositionRange Close();

  int64_t num_bytes() const;
  int32_t num_expected() const;

 private:
  int32_t ChunkAt(size_t index) const;
  bool WantsLocked(int32_t chunk) const { return kv_ != nullptr && chunk >= front_ && chunk < end_; }

  const Model& model_;
  mutable std::mutex mutex_;        // guards all below, and the copying into pages
  std::shared_ptr<SequenceKv> kv_;  // null: closed
  const int32_t first_;
  int32_t end_;
  int32_t front_;  // chunks before it are computed
  int32_t landed_begin_ = 0, landed_end_ = 0;
  Order order_ = Order::kForwards;
  int64_t num_bytes_ = 0;
  std::map<size_t, std::vector<std::byte>> staged_;
  std::vector<std::vector<std::byte>> spare_;
};

}  // namespace spl::engine
