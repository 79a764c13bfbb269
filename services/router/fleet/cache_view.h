// Cache contents as the prefill workers report them: the same for every router, whichever router sent the prompts.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "services/base/metrics.h"
#include "services/chunk/chunk.h"
#include "services/router/fleet/prefix_index.h"

namespace spl::router {

struct CacheViewOptions {
  // Limit of keys over all workers, about 60 bytes each. A worker that would exceed it is no longer known, and
  // placement uses its own guess for that worker.
  size_t max_keys = 2'000'000;
};

// By worker and its life. Thread-safe; one mutex, a lookup walks one prompt's keys.
class CacheView {
 public:
  CacheView(const CacheViewOptions& options, Metrics& metrics);

  // Sequence number from which a watch of this life continues; 0: start with a snapshot.
  uint64_t NextSequence(const std::string& worker_id, uint64_t epoch) const;
  // Starts a snapshot: earlier knowledge of the worker is void, and the worker is unknown until the snapshot is
  // complete. `with_segments`: the worker also reports segments.
  void BeginSnapshot(const std::string& worker_id, uint64_t epoch, bool with_segments = true);
  // `keys`: 32 bytes each.
  void AddToSnapshot(const std::string& worker_id, uint64_t epoch, std::string_view keys);
  void EndSnapshot(const std::string& worker_id, uint64_t epoch, uint64_t next_sequence);
  // Applies events from number `sequence` on. False: there is a gap, or there is no snapshot; the watch must start
  // over.
  bool Apply(const std::string& worker_id, uint64_t epoch, uint64_t sequence, bool stored, std::string_view keys);
  void Forget(const std::string& worker_id);

  // Returns for each segment how many of its leading tokens the worker has. False: unknown.
  bool CountSegments(const std::string& worker_id, uint64_t epoch, std::span<const SegmentKey> segments,
                     std::vector<uint32_t>* tokens) const;
  // Returns how many leading keys the worker has. False: unknown.
  bool CountLeading(const std::string& worker_id, uint64_t epoch, std::span<const chunk::ChunkKey> keys,
                    size_t* count) const;
  size_t size() const;

 private:
  struct Cache {
    uint64_t epoch = 0;
    uint64_t next_sequence = 0;  // 0: no complete snapshot
    bool too_large = false;
    bool with_segments = false;
    // chunk keys of prefixes and segments, which never coincide
    std::unordered_set<chunk::ChunkKey, chunk::ChunkKeyHash> keys;
  };
  Cache* FindLocked(const std::string& worker_id, uint64_t epoch);
  const Cache* FindKnownLocked(const std::string& worker_id, uint64_t epoch) const;
  void InsertLocked(Cache& cache, std::string_view keys);
  void ClearLocked(Cache& cache);
  void UpdateGaugeLocked() { keys_gauge_.Set(static_cast<double>(num_keys_)); }

  const CacheViewOptions options_;
  prometheus::Gauge& keys_gauge_;
  prometheus::Counter& resyncs_;
  mutable std::mutex mutex_;  // guards the two below
  std::map<std::string, Cache> caches_;
  size_t num_keys_ = 0;
};

}  // namespace spl::router
