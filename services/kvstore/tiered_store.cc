#include "services/kvstore/tiered_store.h"

#include "services/base/log.h"
#include "services/base/status.h"

namespace spl::kvstore {
namespace {

// One group commit: enough to hide the sync, little enough to be on disk soon.
constexpr size_t kBatchChunks = 64;
constexpr uint64_t kBatchBytes = 64 << 20;

}  // namespace

struct TieredStore::Handles {
  explicit Handles(Metrics& m)
      : hits_memory(m.Counter("splice_store_hits_total", "Chunks served.", {{"tier", "memory"}})),
        hits_disk(m.Counter("splice_store_hits_total", "Chunks served.", {{"tier", "disk"}})),
        misses(m.Counter("splice_store_misses_total", "Chunks asked for and not stored.")),
        corrupt(m.Counter("splice_store_corrupt_dropped_total", "Chunks dropped because their bytes had changed.")),
        puts(m.Counter("splice_store_chunks_stored_total", "Chunks accepted that were not stored before.")),
        stored_bytes(m.Counter("splice_store_stored_bytes_total", "Payload bytes accepted.")),
        evicted_memory(m.Counter("splice_store_evictions_total", "Chunks evicted.", {{"tier", "memory"}})),
        evicted_disk(m.Counter("splice_store_evictions_total", "Chunks evicted.", {{"tier", "disk"}})),
        write_dropped(m.Counter("splice_store_write_dropped_total", "Chunks that did not reach the disk.")),
        chunks_memory(m.Gauge("splice_store_chunks", "Chunks stored.", {{"tier", "memory"}})),
        chunks_disk(m.Gauge("splice_store_chunks", "Chunks stored.", {{"tier", "disk"}})),
        used_memory(m.Gauge("splice_store_used_bytes", "Bytes in use.", {{"tier", "memory"}})),
        used_disk(m.Gauge("splice_store_used_bytes", "Bytes in use.", {{"tier", "disk"}})),
        queue(m.Gauge("splice_store_write_queue_chunks", "Chunks waiting for the disk.")),
        read_seconds(m.Histogram("splice_store_disk_read_seconds", "One chunk from disk.", buckets::Stage())),
        write_seconds(m.Histogram("splice_store_disk_write_seconds", "One group commit.", buckets::Stage())) {}

  prometheus::Counter &hits_memory, &hits_disk, &misses, &corrupt, &puts, &stored_bytes;
  prometheus::Counter &evicted_memory, &evicted_disk, &write_dropped;
  prometheus::Gauge &chunks_memory, &chunks_disk, &used_memory, &used_disk, &queue;
  prometheus::Histogram &read_seconds, &write_seconds;
  std::mutex update_mutex;  // counters are moved up to what the tiers count
};

namespace {

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void RaiseTo(prometheus::Counter& counter, uint64_t value) {
  const double missing = static_cast<double>(value) - counter.Value();
  if (missing > 0) counter.Increment(missing);
}

}  // namespace

TieredStore::TieredStore(const TieredStoreOptions& options, Metrics& metrics)
    : options_(options),
      memory_(options.memory_bytes),
      write_queue_(options.write_queue_chunks),
      metrics_(std::make_unique<Handles>(metrics)) {
  metrics.Gauge("splice_store_capacity_bytes", "Capacity.", {{"tier", "memory"}})
      .Set(static_cast<double>(options.memory_bytes));
  metrics.Gauge("splice_store_capacity_bytes", "Capacity.", {{"tier", "disk"}})
      .Set(options.data_dir.empty() ? 0 : static_cast<double>(options.disk_bytes));
}

absl::StatusOr<std::unique_ptr<TieredStore>> TieredStore::Open(const TieredStoreOptions& options, Metrics& metrics) {
  auto store = std::unique_ptr<TieredStore>(new TieredStore(options, metrics));
  if (!options.data_dir.empty()) {
    SPLICE_ASSIGN_OR_RETURN(store->disk_, DiskTier::Open({options.data_dir, options.disk_bytes}));
    store->writer_ = std::thread([s = store.get()] { s->WriteLoop(); });
  }
  store->UpdateGauges();
  return store;
}

TieredStore::~TieredStore() { Stop(); }

std::shared_ptr<const chunk::Chunk> TieredStore::FindPending(const chunk::ChunkKey& key) const {
  std::lock_guard lock(pending_mutex_);
  const auto found = pending_.find(key);
  return found == pending_.end() ? nullptr : found->second;
}

bool TieredStore::Contains(const chunk::ChunkKey& key) const {
  if (memory_.Contains(key)) return true;
  return disk_ != nullptr && (FindPending(key) != nullptr || disk_->Contains(key));
}

absl::StatusOr<std::shared_ptr<const chunk::Chunk>> TieredStore::Get(const chunk::ChunkKey& key) {
  std::shared_ptr<const chunk::Chunk> chunk = memory_.Find(key);
  if (chunk == nullptr && disk_ != nullptr) chunk = FindPending(key);
  if (chunk != nullptr) {
    metrics_->hits_memory.Increment();
    return chunk;
  }
  if (disk_ != nullptr && disk_->Contains(key)) {
    const auto start = std::chrono::steady_clock::now();
    SPLICE_ASSIGN_OR_RETURN(chunk, disk_->Read(key));
    metrics_->read_seconds.Observe(SecondsSince(start));
    if (chunk == nullptr) UpdateGauges();  // it was damaged
  }
  if (chunk == nullptr) {
    metrics_->misses.Increment();
    return chunk;
  }
  metrics_->hits_disk.Increment();
  memory_.Insert(chunk);
  return chunk;
}

absl::StatusOr<TieredStore::PutResult> TieredStore::Put(chunk::Chunk chunk) {
  if (Contains(chunk.header.key)) return PutResult::kExisting;
  const auto shared = std::make_shared<const chunk::Chunk>(std::move(chunk));
  const bool in_memory = memory_.Insert(shared);
  const bool queued = disk_ != nullptr && EnqueueWrite(shared);
  if (disk_ != nullptr && !queued) metrics_->write_dropped.Increment();
  UpdateGauges();
  if (!in_memory && !queued) {
    return Errorf(absl::StatusCode::kResourceExhausted, "no room for chunk {} of {} bytes", shared->header.key.ToHex(),
                  shared->payload.size());
  }
  metrics_->puts.Increment();
  metrics_->stored_bytes.Increment(static_cast<double>(shared->payload.size()));
  return PutResult::kStored;
}

bool TieredStore::EnqueueWrite(const std::shared_ptr<const chunk::Chunk>& chunk) {
  std::lock_guard lock(pending_mutex_);
  if (pending_bytes_ + chunk->payload.size() > options_.write_queue_bytes) return false;
  if (pending_.count(chunk->header.key) != 0) return true;
  if (!write_queue_.TryPush(chunk)) return false;
  pending_.emplace(chunk->header.key, chunk);
  pending_bytes_ += chunk->payload.size();
  return true;
}

void TieredStore::WriteLoop() {
  for (;;) {
    std::vector<std::shared_ptr<const chunk::Chunk>> batch;
    uint64_t bytes = 0;
    auto next = write_queue_.Pop(std::chrono::seconds(1));
    while (next.has_value()) {
      bytes += (*next)->payload.size();
      batch.push_back(std::move(*next));
      next = batch.size() < kBatchChunks && bytes < kBatchBytes ? write_queue_.TryPop() : std::nullopt;
    }
    if (!batch.empty()) {
      WriteBatch(batch);
    } else if (write_queue_.closed()) {
      return;
    }
  }
}

void TieredStore::WriteBatch(const std::vector<std::shared_ptr<const chunk::Chunk>>& batch) {
  const auto start = std::chrono::steady_clock::now();
  if (const DiskTier::WriteResult result = disk_->Write(batch); !result.status.ok()) {
    metrics_->write_dropped.Increment(static_cast<double>(result.num_failed));
    log::Warning("kvstore.write_failed", log::F("chunks", result.num_failed), log::F("cause", result.status));
  }
  metrics_->write_seconds.Observe(SecondsSince(start));
  {
    std::lock_guard lock(pending_mutex_);
    for (const auto& chunk : batch) {
      pending_bytes_ -= chunk->payload.size();
      pending_.erase(chunk->header.key);
    }
  }
  pending_changed_.notify_all();
  UpdateGauges();
}

bool TieredStore::Drain(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(pending_mutex_);
  return pending_changed_.wait_until(lock, deadline, [&] { return pending_.empty(); });
}

void TieredStore::Stop() {
  write_queue_.Close();
  if (writer_.joinable()) writer_.join();
}

TieredStore::Stats TieredStore::stats() const {
  Stats stats;
  stats.memory = memory_.stats();
  stats.memory_capacity_bytes = options_.memory_bytes;
  if (disk_ != nullptr) {
    stats.disk = disk_->stats();
    stats.disk_capacity_bytes = options_.disk_bytes;
  }
  stats.hits = static_cast<uint64_t>(metrics_->hits_memory.Value() + metrics_->hits_disk.Value());
  stats.misses = static_cast<uint64_t>(metrics_->misses.Value());
  return stats;
}

void TieredStore::UpdateGauges() {
  const Stats now = stats();
  std::lock_guard lock(metrics_->update_mutex);
  metrics_->chunks_memory.Set(static_cast<double>(now.memory.num_chunks));
  metrics_->chunks_disk.Set(static_cast<double>(now.disk.num_chunks));
  metrics_->used_memory.Set(static_cast<double>(now.memory.bytes));
  metrics_->used_disk.Set(static_cast<double>(now.disk.bytes));
  metrics_->queue.Set(static_cast<double>(write_queue_.size()));
  RaiseTo(metrics_->evicted_memory, now.memory.num_evicted);
  RaiseTo(metrics_->evicted_disk, now.disk.num_evicted);
  RaiseTo(metrics_->corrupt, now.disk.num_corrupt);
}

}  // namespace spl::kvstore
