// Exact prefix index: chunk key (hash chain from the start of the prompt, salted by namespace and model) → pages.
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

// Owns a share of every page it lists. Holds EXACT KV only (docs/methods/provenance.md, P2): Insert takes nothing else.
// Any thread may call. Eviction is least recently used, deepest chunk of a prompt first, and frees only entries that
// nobody else uses.
class PrefixIndex {
 public:
  // Told of every chunk that comes and goes, in order, from inside the index: it must not block nor call back.
  using Observer = std::function<void(bool stored, std::span<const chunk::ChunkKey> keys)>;

  explicit PrefixIndex(PagePool& pool, Observer observer = nullptr) : pool_(pool), observer_(std::move(observer)) {}
  ~PrefixIndex();
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // Appends the leading chunks of `keys` that are here to an empty sequence; returns how many.
  size_t AppendLeading(std::span<const chunk::ChunkKey> keys, SequenceKv& kv);
  // How many leading chunks are here; does not count as use.
  size_t CountLeading(std::span<const chunk::ChunkKey> keys) const;

  // Indexes chunk i of `kv` under keys[i] for every full chunk that is written and exact; chunks already present stay
  // as they are.
  void Insert(std::span<const chunk::ChunkKey> keys, const SequenceKv& kv);

  // Drops unused entries until the pool has `num_free` free pages or no entry can be freed. True when it has.
  bool EvictUntilFree(int64_t num_free);

  size_t size() const;

 private:
  struct Entry {
    std::vector<int32_t> pages;                    // [layer][kv_head]
    std::list<chunk::ChunkKey>::iterator recency;  // position in recency_
  };

  PagePool& pool_;
  const Observer observer_;
  mutable std::mutex mutex_;            // guards all below
  std::list<chunk::ChunkKey> recency_;  // most recently used first
  std::unordered_map<chunk::ChunkKey, Entry, chunk::ChunkKeyHash> entries_;
};

}  // namespace spl::engine
