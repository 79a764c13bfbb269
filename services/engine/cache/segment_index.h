// Virtual blocks: which text has KV in the local pages, wherever it stood (SparseX 4.5). Nothing is
// copied to index it, and one page may be found under many keys.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "services/chunk/chunk.h"
#include "services/engine/cache/segment_source.h"
#include "services/engine/model/position_ranges.h"

namespace spl::engine {

// Two kinds of sources: ordinary ones, of which the one that was used least recently goes first, and the frozen pool,
// text of knowledge bases that is kept beyond them (docs/methods/sparsex.md: least-referenced first). A frozen source's
// uses are counted from the level at which the last one was dropped, so that what nobody asks for any more does not
// stay for what it was asked once (LFU with dynamic ageing).
//
// Any thread may call. A hit always compares token ids, and a namespace that differs is a miss (P7). Invariants: every
// entry leads to a source that is here; a source without entries is not; the frozen order lists every frozen source
// once.
class SegmentIndex {
 public:
  // Told of every key of KeysOf that comes and goes, in order, from inside the index: it must not block nor call back.
  using Observer = std::function<void(bool stored, std::span<const chunk::ChunkKey> keys)>;

  // `fingerprint`: of the model whose KV it is.
  explicit SegmentIndex(const chunk::Digest& fingerprint, Observer observer = nullptr)
      : fingerprint_(fingerprint), observer_(std::move(observer)) {}

  // Makes the source's tokens findable: from their first token on as a segment, and every full chunk of 64 by its text
  // alone. Where all of it is here, what is here stays, counts as used and becomes frozen if `frozen`. Else the new
  // source answers for all of its tokens, but an ordinary one not for what a frozen one answers for; sources that are
  // left with nothing are dropped. True when the source is new.
  bool Insert(const chunk::Digest& namespace_key, std::shared_ptr<const SegmentSource> source, bool frozen = false);

  // Keys of a segment's chunks, the last perhaps of fewer tokens than 64.
  std::vector<chunk::ChunkKey> KeysOf(const chunk::Digest& namespace_key, std::span<const int32_t> tokens) const;
  // Whether all of these are here.
  bool Contains(std::span<const chunk::ChunkKey> keys) const;

  // The longest leading part of the segment tokens[range] that some sources have, in whole chunks of 64 (and a short
  // last one that ends with the segment). `freeze`: these sources are frozen from now on.
  std::vector<SegmentHit> FindSegment(const chunk::Digest& namespace_key, std::span<const int32_t> tokens,
                                      PositionRange range, bool freeze = false);

  // Everything of at least 64 tokens inside tokens[range] that some source has, at any offset; hits ascend.
  std::vector<SegmentHit> FindText(const chunk::Digest& namespace_key, std::span<const int32_t> tokens,
                                   PositionRange range);

  // Drops the ordinary source that was used least recently. False when there is none.
  bool EvictOne();
  // Drops the frozen source that was used least. False when there is none.
  bool EvictFrozen();

  int64_t frozen_pages() const;

  struct Stats {
    size_t num_sources = 0;  // frozen ones included
    int64_t num_tokens = 0;
    size_t num_frozen = 0;
    int64_t frozen_tokens = 0;
    int64_t frozen_pages = 0;  // a page that two frozen sources share counts twice
    uint64_t num_frozen_dropped = 0;
  };
  Stats stats() const;
  void CheckInvariants() const;  // aborts on a broken one

 private:
  struct Source;
  using Sources = std::list<Source>;
  using FrozenOrder = std::multimap<uint64_t, Sources::iterator>;  // by rank; equal ones by their last use
  struct Source {
    chunk::Digest namespace_key{};
    std::shared_ptr<const SegmentSource> source;
    // What it was inserted with. Of these, the entries that lead here; the others answer elsewhere.
    std::vector<chunk::ChunkKey> keys;
    std::vector<uint64_t> text_hashes;
    size_t num_entries = 0;
    bool frozen = false;
    FrozenOrder::iterator order{};  // of a frozen one
    int64_t num_pages() const;
  };
  struct Place {
    Sources::iterator source;
    int32_t offset = 0;
  };
  using Dropped = std::vector<std::shared_ptr<const SegmentSource>>;  // their pages go back without the lock

  static uint64_t SaltOf(const chunk::Digest& namespace_key);
  bool ContainsLocked(std::span<const chunk::ChunkKey> keys) const;
  void Use(Sources::iterator source);
  void Freeze(Sources::iterator source);
  // Lets `place` answer for the key unless a frozen source does and `place` is not one.
  template <typename Map, typename Key>
  void Claim(Map& entries, const Key& key, const Place& place, Dropped& dropped);
  template <typename Map, typename Keys>
  void Forget(Map& entries, const Keys& keys, Sources::iterator source);
  void Drop(Sources::iterator source, Dropped& dropped);
  void Tell(bool stored, const chunk::ChunkKey& key) const {
    if (observer_ != nullptr) observer_(stored, {&key, 1});
  }
  void Tell(bool, uint64_t) const {}  // texts are nobody else's business

  const chunk::Digest fingerprint_;
  const Observer observer_;
  mutable std::mutex mutex_;  // guards all below
  Sources sources_;           // ordinary ones, most recently used first
  Sources frozen_;
  FrozenOrder frozen_order_;  // least used first
  uint64_t frozen_age_ = 0;   // rank of the one that was dropped last
  int64_t frozen_pages_ = 0;
  uint64_t num_frozen_dropped_ = 0;
  std::unordered_map<chunk::ChunkKey, Place, chunk::ChunkKeyHash> entries_;
  std::unordered_map<uint64_t, Place> windows_;  // chunks by the hash of their text
};

}  // namespace spl::engine
