// The prefix cache of a worker: chunk key (hash chain from the start of the prompt, salted by namespace and model) →
// pages.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "services/chunk/chunk.h"
#include "services/engine/cache/page_pool.h"
#include "services/engine/cache/sequence_kv.h"

namespace spl::engine {

// Is an owner of every page it lists. Holds EXACT KV only (docs/methods/provenance.md, P2): Insert takes nothing else.
// Eviction is LRU, with the deepest chunk of a prompt first, and skips entries whose pages have other owners, which then
// count as used. Any thread may call.
class PrefixIndex {
 public:
  // Called for every chunk that is added (stored) or removed, in order, with the index's lock held: it must neither
  // block nor call the index.
  using Observer = std::function<void(bool stored, std::span<const chunk::ChunkKey> keys)>;

  explicit PrefixIndex(PagePool& pool, Observer observer = nullptr) : pool_(pool), observer_(std::move(observer)) {}
  ~PrefixIndex();
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // Appends the leading chunks of `keys` that are indexed to an empty sequence, as shared pages. Returns their number.
  size_t AppendLeading(std::span<const chunk::ChunkKey> keys, SequenceKv& kv);
  // Number of leading chunks that are indexed. Does not count as a use.
  size_t CountLeading(std::span<const chunk::ChunkKey> keys) const;

  // Indexes chunk i of `kv` under keys[i], for every full chunk that is written and exact. Chunks that are indexed
  // already keep their pages, and count as used.
  void Insert(std::span<const chunk::ChunkKey> keys, const SequenceKv& kv);

  // Evicts unused entries until the pool has `num_free` free pages, or no entry can be evicted. True if the pool has
  // them.
  bool EvictUntilFree(int64_t num_free);

  size_t size() const;

 private:
  struct Entry {
    std::vector<int32_t> pages;                    // [layer][kv_head]
    std::list<chunk::ChunkKey>::iterator recency;  // position in recency_
  };

  void Release(const Entry& entry);

  PagePool& pool_;
  const Observer observer_;
  mutable std::mutex mutex_;            // guards all below
  std::list<chunk::ChunkKey> recency_;  // most recently used first
  std::unordered_map<chunk::ChunkKey, Entry, chunk::ChunkKeyHash> entries_;
};

}  // namespace spl::engine
