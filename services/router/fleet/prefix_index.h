// The router's guess of what each prefill worker, and the chunk store behind them, has cached: prompts that were routed
// there count as present.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
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
  // Limit of all chunks; the least recently used are evicted first. A chunk takes about 150 bytes, and 12 for each
  // worker beyond two that has it. Those entries are limited too, to four times the number of chunks.
  size_t capacity = 1'048'576;
  std::chrono::seconds ttl{600};  // a guess older than this is worth nothing
  // The same for the chunk store, which holds more than a worker's pages.
  std::chrono::seconds stored_ttl{3'600};
  // Times are stored as seconds since then; none may be earlier.
  std::chrono::steady_clock::time_point epoch = std::chrono::steady_clock::now();
};

// A segment. The index knows it by one key, as a whole; workers report its chunks (CacheView).
struct SegmentKey {
  chunk::ChunkKey key;
  uint32_t begin = 0, end = 0;               // token positions in the prompt
  std::vector<chunk::ChunkKey> chunks = {};  // the last one is `key`; empty: no worker is asked for them
};

// The keys by which cached parts of a prompt are found.
struct PromptKeys {
  std::vector<chunk::ChunkKey> prefix;  // keys of its full chunks, from the first on
  std::vector<SegmentKey> segments;     // ascending, disjoint; empty if the request reuses exact prefixes only
};

// The keys of the segment's chain of chunks. Tokens must not be empty.
std::vector<chunk::ChunkKey> MakeSegmentKeys(const chunk::Digest& model_fingerprint, const chunk::Digest& namespace_key,
                                             std::span<const int32_t> tokens);
// The last key of the chain: it stands for all of the tokens.
chunk::ChunkKey MakeSegmentKey(const chunk::Digest& model_fingerprint, const chunk::Digest& namespace_key,
                               std::span<const int32_t> tokens);

// Tokens of one prompt that one prefill worker would not have to compute.
struct PredictedReuse {
  uint32_t prefix_tokens = 0;   // leading tokens, from its own pages or the store
  uint32_t aligned_tokens = 0;  // tokens of later segments, from the same places
  uint32_t fetched_tokens = 0;  // the part of both that comes from the store
  // Everything before the first aligned token. KV after it is not exact, and only exact KV ever serves as a prefix.
  uint32_t exact_tokens = std::numeric_limits<uint32_t>::max();
};

// Better knowledge of a worker's own pages than the index has.
struct KnownCache {
  std::optional<size_t> leading;                  // leading chunks of the prompt
  std::optional<std::vector<uint32_t>> segments;  // for each of PromptKeys::segments, tokens from its start
};

// Maps chunk keys to the workers that they were sent to. Thread-safe: one mutex, held for one prompt. A wrong guess
// costs placement quality only: the prefill worker looks up what it really has. Cost of a call: keys × workers that
// hold them, at least one cache miss each; see splice_placement_bench.
class PrefixIndex {
 public:
  using Clock = std::chrono::steady_clock;

  explicit PrefixIndex(const PrefixIndexOptions& options) : options_(options) {}
  PrefixIndex(const PrefixIndex&) = delete;

  // One life of one worker: after a restart its cache is empty.
  struct Holder {
    std::string worker_id;
    uint64_t epoch = 0;
    bool reads_store = true;
    // Chunks that its pages hold; 0: unknown. Later prompts push out the chunks that were used longest ago.
    uint64_t max_chunks = 0;
    bool operator==(const Holder&) const = default;
  };

  // Returns for each holder what it is expected to have. `known`: the same from better sources; empty: there are none.
  std::vector<PredictedReuse> Predict(const PromptKeys& keys, std::span<const Holder> holders, Clock::time_point now,
                                      std::span<const KnownCache> known = {});
  // Records that the prompt was sent there. Its chunks within exact_tokens count as present, and so do all of its
  // segments: the worker computes missing sources by itself when it is idle.
  void Insert(const PromptKeys& keys, const Holder& holder, uint32_t exact_tokens, Clock::time_point now);
  // Records that a worker which stores its chunks and segments has computed the prompt; those within exact_tokens
  // count.
  void InsertStored(const PromptKeys& keys, uint32_t exact_tokens, Clock::time_point now);

  // Returns for each holder the number of leading keys that it is expected to have in its own pages.
  std::vector<size_t> CountLeading(std::span<const chunk::ChunkKey> keys, std::span<const Holder> holders,
                                   Clock::time_point now);
  // [holder][segment]: 1 if the holder is expected to have the segment in its own pages.
  std::vector<std::vector<uint8_t>> HoldsSegments(std::span<const SegmentKey> segments, std::span<const Holder> holders,
                                                  Clock::time_point now);
  void Insert(std::span<const chunk::ChunkKey> keys, const Holder& holder, Clock::time_point now);
  size_t size() const;

 private:
  using Seconds = uint32_t;  // since options_.epoch
  struct Presence {
    uint32_t holder = 0;
    Seconds expires = 0;
    uint32_t age_class = 0;  // number of the class in the holder's Pool at its last use
  };
  // Tells which chunks a worker must have evicted by now, if it drops those that were used longest ago. Chunks used one
  // after the other share an age class, so that a use costs no list of its own.
  struct Pool {
    // Class number -> chunks whose last use fell into it; none is empty but the newest. The oldest one that is left
    // bounds what the worker still has.
    std::map<uint32_t, uint64_t> classes = {{0, 0}};
    uint64_t chunks = 0;  // sum of them
  };
  // Entries form a list by age through these pointers; nodes of an unordered_map do not move.
  struct Entry {
    Entry* newer = nullptr;
    Entry* older = nullptr;
    const chunk::ChunkKey* key = nullptr;
    absl::InlinedVector<Presence, 2> holders;  // each worker at most once
    Seconds stored_until = 0;
  };
  struct Interned {
    uint64_t epoch = 0;
    uint32_t id = 0;  // new for every epoch, so that entries of an earlier life match no worker
  };
  struct Leading {
    std::vector<uint32_t> of_holder;  // chunks per holder
    uint32_t stored = 0;
  };

  Seconds SecondsAt(Clock::time_point time) const;
  uint32_t InternLocked(const Holder& holder);
  std::vector<int32_t> PositionsLocked(std::span<const Holder> holders) const;
  Leading CountLeadingLocked(std::span<const chunk::ChunkKey> keys, const std::vector<int32_t>& positions,
                             size_t num_holders, Seconds now);
  Entry* FindLocked(const chunk::ChunkKey& key);
  Entry& AddLocked(const chunk::ChunkKey& key);
  void AddChainLocked(std::span<const chunk::ChunkKey> keys, uint32_t id, const Holder& holder, Seconds now);
  // `chunks`: pages that the key stands for.
  void AddPresenceLocked(const chunk::ChunkKey& key, uint32_t id, const Holder& holder, uint32_t chunks, Seconds now);
  // Counts a use. `presence` null: its first. Returns the class.
  uint32_t UsePoolLocked(uint32_t id, uint64_t max_chunks, const Presence* presence, uint32_t chunks);
  bool HasLocked(const Presence& presence, Seconds now) const {
    return presence.expires > now && presence.age_class >= pools_[presence.holder].classes.begin()->first;
  }
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
  std::vector<Pool> pools_;                            // by Interned::id
};

}  // namespace spl::router
