// The router's guess of what each prefill worker, and the chunk store behind them all, has cached: what was routed
// there counts as present.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "services/chunk/chunk.h"

namespace spl::router {

struct PrefixIndexOptions {
  // Chunks in all; the least recently used go first. A chunk takes about 140 bytes, and 8 for each worker beyond two
  // that has it; these are bounded as well, to four times as many as there may be chunks.
  size_t capacity = 1'048'576;
  std::chrono::seconds ttl{600};  // a guess older than this is worth nothing
  // Likewise for what is in the chunk store, which holds more than a worker's pages.
  std::chrono::seconds stored_ttl{3'600};
  // Times are kept as seconds since then; none may be earlier.
  std::chrono::steady_clock::time_point epoch = std::chrono::steady_clock::now();
};

// A segment. The index knows it as a whole, by one key; workers tell of its chunks (CacheView).
struct SegmentKey {
  chunk::ChunkKey key;
  uint32_t begin = 0, end = 0;               // tokens of the prompt
  std::vector<chunk::ChunkKey> chunks = {};  // the last one is `key`; empty: nobody is asked for them
};

// What a prompt may be found by.
struct PromptKeys {
  std::vector<chunk::ChunkKey> prefix;  // of its full chunks, from the first on
  std::vector<SegmentKey> segments;     // ascending, disjoint; empty when the request reuses exact prefixes only
};

// The keys of the segment's chain of chunks. Tokens must not be empty.
std::vector<chunk::ChunkKey> MakeSegmentKeys(const chunk::Digest& model_fingerprint, const chunk::Digest& namespace_key,
                                             std::span<const int32_t> tokens);
// The last one: it stands for all of the tokens.
chunk::ChunkKey MakeSegmentKey(const chunk::Digest& model_fingerprint, const chunk::Digest& namespace_key,
                               std::span<const int32_t> tokens);

// What one prefill worker would not have to compute of one prompt.
struct PredictedReuse {
  uint32_t prefix_tokens = 0;   // leading ones, from its own pages or the store
  uint32_t aligned_tokens = 0;  // of segments behind these, likewise
  uint32_t fetched_tokens = 0;  // of both: those that come from the store
  // Everything in front of the first aligned token: behind it nothing is exact, and only exact KV is ever a prefix.
  uint32_t exact_tokens = std::numeric_limits<uint32_t>::max();
};

// What somebody knows of a worker's own pages better than the index does.
struct KnownCache {
  std::optional<size_t> leading;                  // chunks of the prompt
  std::optional<std::vector<uint32_t>> segments;  // of each of PromptKeys::segments, tokens from its start
};

// Maps chunk keys to the workers that were sent them. Thread-safe: one mutex, held for one prompt.
// A wrong guess costs placement quality only: the prefill worker looks up what it really has.
// Cost of a call: keys × workers that hold them, at least one cache miss each; splice_placement_bench.
class PrefixIndex {
 public:
  using Clock = std::chrono::steady_clock;

  explicit PrefixIndex(const PrefixIndexOptions& options) : options_(options) {}
  PrefixIndex(const PrefixIndex&) = delete;

  // Identifies one life of one worker: after a restart its cache is empty.
  struct Holder {
    std::string worker_id;
    uint64_t epoch = 0;
    bool reads_store = true;
    bool operator==(const Holder&) const = default;
  };

  // For each holder what it is expected to have; `known`: likewise what is known (empty: nothing is).
  std::vector<PredictedReuse> Predict(const PromptKeys& keys, std::span<const Holder> holders, Clock::time_point now,
                                      std::span<const KnownCache> known = {});
  // The prompt was sent there. Of its chunks those within exact_tokens count as present; of its segments all: what the
  // worker has no source for yet it will compute by itself when it is idle.
  void Insert(const PromptKeys& keys, const Holder& holder, uint32_t exact_tokens, Clock::time_point now);
  // The prompt was computed by somebody who puts the chunks and segments within exact_tokens into the store.
  void InsertStored(const PromptKeys& keys, uint32_t exact_tokens, Clock::time_point now);

  // For each holder the number of leading keys it is expected to have in its own pages.
  std::vector<size_t> CountLeading(std::span<const chunk::ChunkKey> keys, std::span<const Holder> holders,
                                   Clock::time_point now);
  // [holder][segment]: 1 where the holder is expected to have the segment in its own pages.
  std::vector<std::vector<uint8_t>> HoldsSegments(std::span<const SegmentKey> segments, std::span<const Holder> holders,
                                                  Clock::time_point now);
  void Insert(std::span<const chunk::ChunkKey> keys, const Holder& holder, Clock::time_point now);
  size_t size() const;

 private:
  using Seconds = uint32_t;  // since options_.epoch
  struct Presence {
    uint32_t holder = 0;
    Seconds expires = 0;
  };
  // Entries form a list by age through these pointers; nodes of an unordered_map stay where they are.
  struct Entry {
    Entry* newer = nullptr;
    Entry* older = nullptr;
    const chunk::ChunkKey* key = nullptr;
    absl::InlinedVector<Presence, 2> holders;  // a worker is in it once
    Seconds stored_until = 0;
  };
  struct Interned {
    uint64_t epoch = 0;
    uint32_t id = 0;  // drawn anew with every epoch, so that what an earlier life had matches nobody
  };
  struct Leading {
    std::vector<uint32_t> of_holder;  // chunks
    uint32_t stored = 0;
  };

  Seconds SecondsAt(Clock::time_point time) const;
  uint32_t InternLocked(const Holder& holder);
  std::vector<int32_t> PositionsLocked(std::span<const Holder> holders) const;
  Leading CountLeadingLocked(std::span<const chunk::ChunkKey> keys, const std::vector<int32_t>& positions,
                             size_t num_holders, Seconds now);
  Entry* FindLocked(const chunk::ChunkKey& key);
  Entry& AddLocked(const chunk::ChunkKey& key);
  void AddPresenceLocked(const chunk::ChunkKey& key, uint32_t holder, Seconds now);
  void MakeNewestLocked(Entry& entry);
  void UnlinkLocked(Entry& entry);
  void EvictLocked();

  const PrefixIndexOptions options_;
  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<chunk::ChunkKey, Entry, chunk::ChunkKeyHash> entries_;
  Entry* newest_ = nullptr;
  Entry* oldest_ = nullptr;
  size_t num_presences_ = 0;
  std::unordered_map<std::string, Interned> holders_;  // by worker_id
  uint32_t next_holder_ = 0;
};

}  // namespace spl::router
