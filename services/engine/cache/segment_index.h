// Virtual blocks: which text has KV in the local pages, wherever it stood (SparseX 4.5; DESIGN section 3). Nothing is
// copied to index it, and one page may be found under many keys.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "services/chunk/chunk.h"
#include "services/engine/cache/segment_source.h"
#include "services/engine/recovery/ranges.h"

namespace spl::engine {

// Any thread may call. A hit always compares token ids, and a namespace that differs is a miss (P7).
class SegmentIndex {
 public:
  // `fingerprint`: of the model whose KV it is.
  explicit SegmentIndex(const chunk::Digest& fingerprint) : fingerprint_(fingerprint) {}

  // Makes the source's tokens findable: from their first token on as a segment, and every full chunk of 64 by its text
  // alone. What is there already stays, and counts as used. True when the source is new.
  bool Insert(const chunk::Digest& namespace_key, std::shared_ptr<const SegmentSource> source);

  // Keys of a segment's chunks, the last perhaps of fewer tokens than 64.
  std::vector<chunk::ChunkKey> KeysOf(const chunk::Digest& namespace_key, std::span<const int32_t> tokens) const;
  // Whether all of these are here.
  bool Contains(std::span<const chunk::ChunkKey> keys) const;

  // The longest leading part of the segment tokens[range] that some sources have, in whole chunks of 64 (and a short
  // last one that ends with the segment).
  std::vector<SegmentHit> FindSegment(const chunk::Digest& namespace_key, std::span<const int32_t> tokens,
                                      PositionRange range);

  // Everything of at least 64 tokens inside tokens[range] that some source has, at any offset; hits ascend.
  std::vector<SegmentHit> FindText(const chunk::Digest& namespace_key, std::span<const int32_t> tokens,
                                   PositionRange range);

  // Drops the source that was used least recently. False when there is none.
  bool EvictOne();

  struct Stats {
    size_t num_sources = 0;
    int64_t num_tokens = 0;
  };
  Stats stats() const;

 private:
  struct Source {
    chunk::Digest namespace_key{};
    std::shared_ptr<const SegmentSource> source;
    std::vector<chunk::ChunkKey> keys;  // entries that point here
    std::vector<uint64_t> text_hashes;  // the same, of windows_
  };
  using Sources = std::list<Source>;  // most recently used first
  struct Place {
    Sources::iterator source;
    int32_t offset = 0;
  };

  static uint64_t SaltOf(const chunk::Digest& namespace_key);
  void Use(Sources::iterator source) { sources_.splice(sources_.begin(), sources_, source); }

  const chunk::Digest fingerprint_;
  mutable std::mutex mutex_;  // guards all below
  Sources sources_;
  std::unordered_map<chunk::ChunkKey, Place, chunk::ChunkKeyHash> entries_;
  std::unordered_map<uint64_t, Place> windows_;  // chunks by the hash of their text
};

}  // namespace spl::engine
