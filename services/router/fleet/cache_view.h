// What the prefill workers say that they have cached: the same for every router, whoever sent the prompts.
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
  // Of all workers together, about 60 bytes each. A worker that would go beyond is not known from then on, and
  // placement goes by its own guess for it.
  size_t max_keys = 2'000'000;
};

// By worker and its life. Thread-safe; one mutex, a lookup walks one prompt's keys.
class CacheView {
 public:
  CacheView(const CacheViewOptions& options, Metrics& metrics);

  // Where a watch of this life goes on; 0: from a snapshot.
  uint64_t NextSequence(const std::string& worker_id, uint64_t epoch) const;
  // A snapshot begins: what was known of the worker is void, and it is not known until the snapshot is whole.
  // `with_segments`: the worker tells of segments, too.
  void BeginSnapshot(const std::string& worker_id, uint64_t epoch, bool with_segments = true);
  // `keys`: 32 bytes each.
  void AddToSnapshot(const std::string& worker_id, uint64_t epoch, std::string_view keys);
  void EndSnapshot(const std::string& worker_id, uint64_t epoch, uint64_t next_sequence);
  // Events from number `sequence` on. False: there is a gap, or the view holds no snapshot; the watch must start over.
  bool Apply(const std::string& worker_id, uint64_t epoch, uint64_t sequence, bool stored, std::string_view keys);
  void Forget(const std::string& worker_id);

  // For each segment how many of its leading tokens the worker has. False: it is not known.
  bool CountSegments(const std::string& worker_id, uint64_t epoch, std::span<const SegmentKey> segments,
                     std::vector<uint32_t>* tokens) const;
  // How many leading keys the worker has. False: it is not known.
  bool CountLeading(const std::string& worker_id, uint64_t epoch, std::span<const chunk::ChunkKey> keys,
                    size_t* count) const;
  size_t size() const;

 private:
  struct Cache {
    uint64_t epoch = 0;
    uint64_t next_sequence = 0;  // 0: no whole snapshot
    bool too_large = false;
    bool with_segments = false;
    std::unordered_set<chunk::ChunkKey, chunk::ChunkKeyHash> keys;  // of both kinds, which never are the same
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
