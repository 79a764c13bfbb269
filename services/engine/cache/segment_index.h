// Index of the text that has KV in local pages, at whatever position it was computed (SparseX 4.5, virtual blocks).
// Indexing copies nothing, and one page may be found under many keys.
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

// There are two kinds of sources. Ordinary ones are evicted LRU. Frozen ones, text of knowledge bases that is kept
// longer than ordinary text, are evicted least-referenced first (docs/methods/sparsex.md). A frozen source's uses are
// counted from the level at which the last one was dropped, so that a source that is no longer used does not stay
// because of its past (LFU with dynamic ageing).
//
// Any thread may call. A lookup always compares token ids, and another namespace is a miss (P7). Invariants: every
// entry leads to a source in the index; every source has an entry; the frozen order lists every frozen source once.
class SegmentIndex {
 public:
  // Called for every key of KeysOf that is added (stored) or removed, in order, with the index's lock held: it must
  // neither block nor call the index.
  using Observer = std::function<void(bool stored, std::span<const chunk::ChunkKey> keys)>;

  // `fingerprint`: the model's, whose KV is indexed.
  explicit SegmentIndex(const chunk::Digest& fingerprint, Observer observer = nullptr)
      : fingerprint_(fingerprint), observer_(std::move(observer)) {}
  ~SegmentIndex();
  SegmentIndex(const SegmentIndex&) = delete;
  SegmentIndex& operator=(const SegmentIndex&) = delete;

  // Indexes the source's tokens: from its first token on as a segment, and every full chunk of 64 tokens by its text
  // alone. If all of them are indexed already, the present sources stay, count as used, and become frozen if `frozen`.
  // Otherwise the new source takes over all of its entries, except that an ordinary source takes none from a frozen
  // one; sources without entries are dropped. True if the source was added.
  bool Insert(const chunk::Digest& namespace_key, std::shared_ptr<const SegmentSource> source, bool frozen = false);
  // The same, but the new source takes the place of all that are indexed for its text, and is frozen if one of them is.
  void Replace(const chunk::Digest& namespace_key, std::shared_ptr<const SegmentSource> source, bool frozen = false);

  // Keys of a segment's chunks of 64 tokens; the last chunk may be shorter.
  std::vector<chunk::ChunkKey> KeysOf(const chunk::Digest& namespace_key, std::span<const int32_t> tokens) const;
  // True if all of these are indexed.
  bool Contains(std::span<const chunk::ChunkKey> keys) const;
  // True if all of these lead to sources that began their prompts (SegmentSource::began_prompt).
  bool ContainsFirst(std::span<const chunk::ChunkKey> keys) const;

  // The longest leading part of the segment tokens[range] that is indexed, in whole chunks of 64 (and a shorter last
  // one that ends with the segment). `freeze`: freezes the sources that are found.
  std::vector<SegmentHit> FindSegment(const chunk::Digest& namespace_key, std::span<const int32_t> tokens,
                                      PositionRange range, bool freeze = false);

  // All text of at least 64 tokens inside tokens[range] that is indexed, at any offset; hits ascend.
  std::vector<SegmentHit> FindText(const chunk::Digest& namespace_key, std::span<const int32_t> tokens,
                                   PositionRange range);

  // Evicts the least recently used ordinary source. False: there is none.
  bool EvictOne();
  // Evicts the least used frozen source. False: there is none.
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
  using FrozenOrder = std::multimap<uint64_t, Sources::iterator>;  // by rank, then by last use
  struct Source {
    chunk::Digest namespace_key{};
    std::shared_ptr<const SegmentSource> source;
    // Keys and hashes that it was inserted with. num_entries of them still lead to this source; the others lead to
    // another one.
    std::vector<chunk::ChunkKey> keys;
    std::vector<uint64_t> text_hashes;
    size_t num_entries = 0;
    bool frozen = false;
    FrozenOrder::iterator order{};  // place in frozen_order_, if frozen
    int64_t num_pages() const;
    // The index is a cache of the pool: PagePool::MarkCached and UnmarkCached for the source's pages.
    void Mark() const;
    void Unmark() const;
  };
  struct Place {
    Sources::iterator source;
    int32_t offset = 0;
  };
  using Dropped = std::vector<std::shared_ptr<const SegmentSource>>;  // released after the lock, with their pages

  static uint64_t SaltOf(const chunk::Digest& namespace_key);
  Source SourceFor(const chunk::Digest& namespace_key, std::shared_ptr<const SegmentSource> source) const;
  void Add(Source source, bool frozen, Dropped& dropped);
  bool ContainsLocked(std::span<const chunk::ChunkKey> keys) const;
  void Use(Sources::iterator source);
  void Freeze(Sources::iterator source);
  // Makes `key` lead to `place`, unless it leads to a frozen source and `place` is an ordinary one.
  template <typename Map, typename Key>
  void Claim(Map& entries, const Key& key, const Place& place, Dropped& dropped);
  template <typename Map, typename Keys>
  void Forget(Map& entries, const Keys& keys, Sources::iterator source);
  void Drop(Sources::iterator source, Dropped& dropped);
  void Tell(bool stored, const chunk::ChunkKey& key) const {
    if (observer_ != nullptr) observer_(stored, {&key, 1});
  }
  void Tell(bool, uint64_t) const {}  // hashes of text are not reported

  const chunk::Digest fingerprint_;
  const Observer observer_;
  mutable std::mutex mutex_;  // guards all below
  Sources sources_;           // ordinary ones, most recently used first
  Sources frozen_;
  FrozenOrder frozen_order_;  // least used first
  uint64_t frozen_age_ = 0;   // rank of the frozen source that was dropped last
  int64_t frozen_pages_ = 0;
  uint64_t num_frozen_dropped_ = 0;
  std::unordered_map<chunk::ChunkKey, Place, chunk::ChunkKeyHash> entries_;
  std::unordered_map<uint64_t, Place> windows_;  // hash of a chunk's text → place
};

}  // namespace spl::engine
