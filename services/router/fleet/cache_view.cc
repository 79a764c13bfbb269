#include "services/router/fleet/cache_view.h"

#include <algorithm>
#include <cstring>

#include "services/base/log.h"

namespace spl::router {
namespace {

constexpr size_t kKeyBytes = sizeof(chunk::Digest);

chunk::ChunkKey KeyAt(std::string_view keys, size_t i) {
  chunk::ChunkKey key;
  std::memcpy(key.bytes.data(), keys.data() + i * kKeyBytes, kKeyBytes);
  return key;
}

}  // namespace

CacheView::CacheView(const CacheViewOptions& options, Metrics& metrics)
    : options_(options),
      keys_gauge_(
          metrics.Gauge("splice_router_cache_view_chunks", "Chunks that prefill workers say they have cached.")),
      resyncs_(metrics.Counter("splice_router_cache_resyncs_total",
                               "Times that the whole content of a worker's cache was read.")) {}

CacheView::Cache* CacheView::FindLocked(const std::string& worker_id, uint64_t epoch) {
  const auto found = caches_.find(worker_id);
  return found == caches_.end() || found->second.epoch != epoch ? nullptr : &found->second;
}

// Null: there is no whole snapshot of it.
const CacheView::Cache* CacheView::FindKnownLocked(const std::string& worker_id, uint64_t epoch) const {
  const auto found = caches_.find(worker_id);
  const bool known = found != caches_.end() && found->second.epoch == epoch && found->second.next_sequence != 0 &&
                     !found->second.too_large;
  return known ? &found->second : nullptr;
}

uint64_t CacheView::NextSequence(const std::string& worker_id, uint64_t epoch) const {
  std::lock_guard lock(mutex_);
  const auto found = caches_.find(worker_id);
  return found == caches_.end() || found->second.epoch != epoch ? 0 : found->second.next_sequence;
}

void CacheView::ClearLocked(Cache& cache) {
  num_keys_ -= cache.keys.size();
  cache = {};
}

void CacheView::BeginSnapshot(const std::string& worker_id, uint64_t epoch, bool with_segments) {
  std::lock_guard lock(mutex_);
  Cache& cache = caches_[worker_id];
  ClearLocked(cache);
  cache.epoch = epoch;
  cache.with_segments = with_segments;
  resyncs_.Increment();
  UpdateGaugeLocked();
}

void CacheView::InsertLocked(Cache& cache, std::string_view keys) {
  for (size_t i = 0; i < keys.size() / kKeyBytes && !cache.too_large; ++i) {
    if (num_keys_ < options_.max_keys) {
      num_keys_ += cache.keys.insert(KeyAt(keys, i)).second;
    } else {
      num_keys_ -= cache.keys.size();
      cache.keys.clear();
      cache.too_large = true;
    }
  }
}

void CacheView::AddToSnapshot(const std::string& worker_id, uint64_t epoch, std::string_view keys) {
  std::lock_guard lock(mutex_);
  if (Cache* const cache = FindLocked(worker_id, epoch); cache != nullptr) InsertLocked(*cache, keys);
  UpdateGaugeLocked();
}

void CacheView::EndSnapshot(const std::string& worker_id, uint64_t epoch, uint64_t next_sequence) {
  std::lock_guard lock(mutex_);
  Cache* const cache = FindLocked(worker_id, epoch);
  if (cache == nullptr) return;
  cache->next_sequence = next_sequence;
  if (cache->too_large) {
    log::Warning("router.cache_view_full", log::F("worker", worker_id), log::F("max_keys", options_.max_keys));
  }
}

bool CacheView::Apply(const std::string& worker_id, uint64_t epoch, uint64_t sequence, bool stored,
                      std::string_view keys) {
  std::lock_guard lock(mutex_);
  Cache* const cache = FindLocked(worker_id, epoch);
  if (cache == nullptr || cache->next_sequence == 0 || cache->next_sequence != sequence) return false;
  cache->next_sequence += keys.size() / kKeyBytes;
  if (stored) {
    InsertLocked(*cache, keys);
  } else {
    for (size_t i = 0; i < keys.size() / kKeyBytes; ++i) num_keys_ -= cache->keys.erase(KeyAt(keys, i));
  }
  UpdateGaugeLocked();
  return true;
}

void CacheView::Forget(const std::string& worker_id) {
  std::lock_guard lock(mutex_);
  const auto found = caches_.find(worker_id);
  if (found == caches_.end()) return;
  ClearLocked(found->second);
  caches_.erase(found);
  UpdateGaugeLocked();
}

bool CacheView::CountLeading(const std::string& worker_id, uint64_t epoch, std::span<const chunk::ChunkKey> keys,
                             size_t* count) const {
  std::lock_guard lock(mutex_);
  const Cache* const cache = FindKnownLocked(worker_id, epoch);
  if (cache == nullptr) return false;
  *count = 0;
  while (*count < keys.size() && cache->keys.contains(keys[*count])) ++*count;
  return true;
}

bool CacheView::CountSegments(const std::string& worker_id, uint64_t epoch, std::span<const SegmentKey> segments,
                              std::vector<uint32_t>* tokens) const {
  std::lock_guard lock(mutex_);
  const Cache* const cache = FindKnownLocked(worker_id, epoch);
  if (cache == nullptr || !cache->with_segments) return false;
  tokens->clear();
  for (const SegmentKey& segment : segments) {
    size_t count = 0;
    while (count < segment.chunks.size() && cache->keys.contains(segment.chunks[count])) ++count;
    // The last chunk may be short.
    tokens->push_back(std::min(segment.end - segment.begin, static_cast<uint32_t>(count * chunk::kChunkTokens)));
  }
  return true;
}

size_t CacheView::size() const {
  std::lock_guard lock(mutex_);
  return num_keys_;
}

}  // namespace spl::router
