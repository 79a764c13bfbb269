#include "services/kvstore/tiered_store.h"

#include <cstring>

#include "services/base/log.h"
#include "services/base/status.h"
#include "services/chunk/chunk_header.h"
#include "services/kvstore/slab_file.h"

namespace spl::kvstore {
namespace {

// Keys of one write to the index: the disk tier is locked meanwhile.
constexpr size_t kRemoveBatch = 256;
constexpr size_t kUsageRowsMax = 8192;
constexpr uint64_t kSlowMaintenanceEvery = 10;

}  // namespace

struct TieredStore::Handles {
  explicit Handles(Metrics& m)
      : hits_memory(m.Counter("splice_store_hits_total", "Chunks served.", {{"tier", "memory"}})),
        hits_disk(m.Counter("splice_store_hits_total", "Chunks served.", {{"tier", "disk"}})),
        misses(m.Counter("splice_store_misses_total", "Chunks asked for and not stored.")),
        corrupt(m.Counter("splice_store_corrupt_dropped_total", "Chunks dropped because their bytes had changed.")),
        index_resets(m.Counter("splice_store_index_resets_total",
                               "Damaged indexes that were set aside at start (--reset-damaged-index).")),
        expired(m.Counter("splice_store_expired_total", "Chunks removed because their namespace's TTL had passed.")),
        refused_quota(m.Counter("splice_store_quota_refused_total", "Puts refused because of a namespace's quota.")),
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

  prometheus::Counter &hits_memory, &hits_disk, &misses, &corrupt, &index_resets, &expired, &refused_quota, &puts,
      &stored_bytes;
  prometheus::Counter &evicted_memory, &evicted_disk, &write_dropped;
  prometheus::Gauge &chunks_memory, &chunks_disk, &used_memory, &used_disk, &queue;
  prometheus::Histogram &read_seconds, &write_seconds;
  std::mutex update_mutex;  // counters are raised to the tiers' counts
};

namespace {

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void RaiseTo(prometheus::Counter& counter, uint64_t value) {
  const double missing = static_cast<double>(value) - counter.Value();
  if (missing > 0) counter.Increment(missing);
}

absl::Status OnDiskStatus(const ChunkRecord& record) {
  return record.on_disk.load() ? absl::OkStatus() : Errorf(absl::StatusCode::kUnavailable, "not on disk yet");
}

}  // namespace

TieredStore::TieredStore(const TieredStoreOptions& options, Metrics& metrics)
    : options_(options),
      namespaces_(*options.clock),
      catalog_(namespaces_, *options.clock),
      metrics_(std::make_unique<Handles>(metrics)) {
  metrics.Gauge("splice_store_capacity_bytes", "Capacity.", {{"tier", "memory"}})
      .Set(static_cast<double>(options.memory_bytes));
  metrics.Gauge("splice_store_capacity_bytes", "Capacity.", {{"tier", "disk"}})
      .Set(options.data_dir.empty() ? 0 : static_cast<double>(options.disk_bytes));
}

absl::StatusOr<std::unique_ptr<TieredStore>> TieredStore::Open(const TieredStoreOptions& options, Metrics& metrics) {
  auto store = std::unique_ptr<TieredStore>(new TieredStore(options, metrics));
  auto memory = PayloadMemory::Create(options.memory_bytes, options.transport);
  if (!memory.ok() && options.transport != nullptr && !options.require_registered) {
    log::Warning("kvstore.no_registered_memory", log::F("cause", memory.status()));  // a small /dev/shm, for example
    memory = PayloadMemory::Create(options.memory_bytes, nullptr);
  }
  if (!memory.ok()) return memory.status();
  store->memory_ = std::move(*memory);
  store->memory_tier_ = std::make_unique<MemoryTier>(*store->memory_, options.watermarks);
  if (!options.data_dir.empty()) {
    SPLICE_ASSIGN_OR_RETURN(store->disk_, DiskTier::Open({options.data_dir, options.disk_bytes, options.watermarks,
                                                          options.reset_damaged_index},
                                                         store->catalog_, store->namespaces_));
    store->metrics_->index_resets.Increment(static_cast<double>(store->disk_->stats().num_index_resets));
    store->namespaces_.SaveTo(&store->disk_->namespace_storage());
    store->writes_ = std::make_unique<WriteBehind>(
        *store->disk_, WriteBehindOptions{options.write_queue_chunks, options.write_queue_bytes},
        [s = store.get()](const WriteBehind::Batch& batch) { s->OnBatch(batch); });
  }
  store->UpdateGauges();
  return store;
}

TieredStore::~TieredStore() { Stop(); }

bool TieredStore::Visible(const chunk::ChunkKey& key) const {
  if (memory_tier_->Find(key, false) != nullptr) return true;
  return disk_ != nullptr && (writes_->Find(key) != nullptr || disk_->Contains(key));
}

std::shared_ptr<ChunkRecord> TieredStore::FindLive(const chunk::ChunkKey& key) {
  std::shared_ptr<ChunkRecord> record = catalog_.Find(key);
  if (record == nullptr || record->Live(catalog_.NowMs())) return record;
  RemoveAll({record});
  return nullptr;
}

bool TieredStore::Contains(const chunk::ChunkKey& key) { return FindLive(key) != nullptr && Visible(key); }

absl::StatusOr<StoredChunkRef> TieredStore::Get(const chunk::ChunkKey& key, bool in_region) {
  const std::shared_ptr<ChunkRecord> record = FindLive(key);
  StoredChunkRef chunk;
  if (record != nullptr) {
    record->uses.fetch_add(1, std::memory_order_relaxed);
    chunk = memory_tier_->Find(key, true);
    if (chunk == nullptr && disk_ != nullptr) chunk = writes_->Find(key);
    if (chunk != nullptr && in_region && !chunk->slot.in_region()) {
      chunk = MoveToRegion(chunk);
      if (chunk == nullptr) {
        return Errorf(absl::StatusCode::kResourceExhausted, "no registered memory is free for chunk {}", key.ToHex());
      }
    }
  }
  const bool from_memory = chunk != nullptr;
  if (record != nullptr && !from_memory && disk_ != nullptr) {
    SPLICE_ASSIGN_OR_RETURN(chunk, ReadDisk(key, in_region));
  }
  if (chunk == nullptr) {
    metrics_->misses.Increment();
    return chunk;
  }
  (from_memory ? metrics_->hits_memory : metrics_->hits_disk).Increment();
  if (disk_ != nullptr) disk_->Touch(key);
  return chunk;
}

bool TieredStore::DropIfDamaged(const chunk::ChunkKey& key) {
  const StoredChunkRef chunk = memory_tier_->Find(key, false);
  return chunk != nullptr && DropIfDamaged(chunk);
}

bool TieredStore::DropIfDamaged(const StoredChunkRef& chunk) {
  const absl::Status status = chunk::VerifyPayload(chunk->header, chunk->payload());
  if (status.ok()) return false;
  if (!memory_tier_->EraseCopy(chunk)) return true;  // another caller has dropped and counted it
  log::Warning("kvstore.chunk_dropped", log::F("tier", "memory"), log::F("cause", status));
  num_damaged_in_memory_.fetch_add(1);
  UpdateGauges();
  return true;
}

absl::StatusOr<StoredChunkRef> TieredStore::ReadDisk(const chunk::ChunkKey& key, bool in_region) {
  const auto take_slot = [&](uint64_t payload_bytes) -> std::optional<SlotBuffer> {
    std::optional<SlotBuffer> slot = memory_tier_->TakeSlot(payload_bytes);
    if (slot.has_value() || in_region) return slot;
    return SlotBuffer::OnHeap(SlotBytesFor(payload_bytes));
  };
  const auto start = std::chrono::steady_clock::now();
  const bool there = disk_->Contains(key);
  SPLICE_ASSIGN_OR_RETURN(StoredChunkRef chunk, disk_->Read(key, take_slot));
  if (there) metrics_->read_seconds.Observe(SecondsSince(start));
  if (chunk == nullptr) {
    if (there) UpdateGauges();  // it was damaged
    return chunk;
  }
  if (chunk->slot.in_region()) memory_tier_->Insert(chunk);
  return chunk;
}

// Moves a chunk into the region that found no room there when it came and still waits for the disk. Null: no room now.
StoredChunkRef TieredStore::MoveToRegion(const StoredChunkRef& chunk) {
  std::optional<SlotBuffer> slot = memory_tier_->TakeSlot(chunk->header.payload_bytes);
  if (!slot.has_value()) return nullptr;
  const std::span<const std::byte> payload = chunk->payload();
  std::memcpy(slot->data() + chunk::kEncodedHeaderBytes, payload.data(), payload.size());
  StoredChunkRef moved = FinishChunk(chunk->record, chunk->header, std::move(*slot));
  memory_tier_->Insert(moved);
  return moved;
}

absl::StatusOr<PreparedPut> TieredStore::Prepare(const chunk::ChunkHeader& header, const chunk::PutOptions& options,
                                                 bool in_region) {
  SPLICE_RETURN_IF_ERROR(chunk::CheckHeaderFields(header));
  if (options.durable && disk_ == nullptr) {
    return Errorf(absl::StatusCode::kFailedPrecondition, "a durable put needs a disk: start the store with --data-dir");
  }
  (void)FindLive(header.key);  // a dead one makes room for its successor
  PreparedPut put;
  put.header = header;
  put.options = options;
  absl::StatusOr<std::shared_ptr<ChunkRecord>> record = catalog_.Admit(header, options);
  if (record.status().code() == absl::StatusCode::kResourceExhausted) metrics_->refused_quota.Increment();
  if (!record.ok()) return record.status();
  put.record = std::move(*record);
  if (Visible(header.key)) {
    if (options.pin != chunk::Pin::kNone) {
      SPLICE_RETURN_IF_ERROR(ApplyPin({put.record}, put.record->pin.load()).status());
    }
    return put;
  }
  put.slot = memory_tier_->TakeSlot(header.payload_bytes);
  if (!put.slot.has_value() && !in_region && disk_ != nullptr) {
    put.slot = SlotBuffer::OnHeap(SlotBytesFor(header.payload_bytes));
  }
  if (put.slot.has_value()) return put;
  return Errorf(absl::StatusCode::kResourceExhausted, "no room for chunk {} of {} bytes: memory is {} bytes{}",
                header.key.ToHex(), header.payload_bytes, memory_->size(),
                header.payload_bytes < memory_->size() ? ", all in use or pinned" : "");
}

absl::Status PreparedPut::Verify() const {
  if (!slot.has_value()) return absl::OkStatus();
  return chunk::VerifyPayload(header, {payload(), static_cast<size_t>(header.payload_bytes)});
}

absl::StatusOr<TieredStore::PutResult> TieredStore::Put(const chunk::Chunk& chunk, const chunk::PutOptions& options,
                                                        WriteBehind::Durable durable) {
  SPLICE_ASSIGN_OR_RETURN(PreparedPut put, Prepare(chunk.header, options, false));
  if (put.slot.has_value()) std::memcpy(put.payload(), chunk.payload.data(), chunk.payload.size());
  return Publish(std::move(put), std::move(durable));
}

// Makes a verified chunk visible. If two puts bring one chunk, the second finds it existing.
absl::StatusOr<TieredStore::PutResult> TieredStore::Publish(PreparedPut put, WriteBehind::Durable durable) {
  StoredChunkRef chunk;
  bool in_memory = false;
  PutResult result = PutResult::kExisting;
  if (put.slot.has_value() && !Visible(put.header.key)) {
    result = PutResult::kStored;
    chunk = FinishChunk(put.record, put.header, std::move(*put.slot));
    in_memory = chunk->slot.in_region() && memory_tier_->Insert(chunk);
  } else if (put.options.durable) {
    if (put.record->on_disk.load()) {
      if (durable) durable(absl::OkStatus());
      return result;
    }
    chunk = memory_tier_->Find(put.header.key, false);
    if (chunk == nullptr) chunk = writes_->Find(put.header.key);
    if (chunk == nullptr) {
      return Errorf(absl::StatusCode::kUnavailable, "chunk {} was evicted while it was put; put it again",
                    put.header.key.ToHex());
    }
  } else {
    // Not asked for: said truthfully all the same.
    if (durable) durable(OnDiskStatus(*put.record));
    return result;
  }
  const bool must_wait = put.options.durable;
  if (disk_ != nullptr && !writes_->Push(chunk, must_wait ? durable : nullptr)) {
    metrics_->write_dropped.Increment();
    if (must_wait || !in_memory || put.record->pin.load() == chunk::Pin::kHard) {
      if (in_memory) memory_tier_->Erase(*put.record);
      return Errorf(absl::StatusCode::kResourceExhausted,
                    "the queue of chunks that wait for the disk is full ({}); put chunk {} again later",
                    writes_->size(), put.header.key.ToHex());
    }
  }
  if (durable && !must_wait) durable(OnDiskStatus(*put.record));
  if (result == PutResult::kStored) {
    metrics_->puts.Increment();
    metrics_->stored_bytes.Increment(static_cast<double>(put.header.payload_bytes));
  }
  UpdateGauges();
  return result;
}

absl::StatusOr<Namespace::Stat> TieredStore::DeleteNamespace(const chunk::Digest& id) {
  SPLICE_ASSIGN_OR_RETURN(const std::shared_ptr<Namespace> dead, namespaces_.Delete(id));
  const Namespace::Stat stat = dead->stat();
  RemoveAll(catalog_.Select([&](const ChunkRecord& record) { return record.owner == dead; }));
  log::Info("kvstore.namespace_deleted", log::F("name", stat.row.settings.name), log::F("chunks", stat.num_chunks),
            log::F("bytes", stat.bytes));
  UpdateGauges();
  return stat;
}

size_t TieredStore::RemoveAll(const std::vector<std::shared_ptr<ChunkRecord>>& records) {
  for (size_t at = 0; at < records.size(); at += kRemoveBatch) {
    const auto batch = std::span(records).subspan(at, std::min(kRemoveBatch, records.size() - at));
    for (const std::shared_ptr<ChunkRecord>& record : batch) memory_tier_->Erase(*record);
    if (disk_ == nullptr) continue;
    if (const absl::Status status = disk_->Remove(batch); !status.ok()) {
      // They are dead with their namespace, so no reader gets them; the next sweep tries again.
      log::Warning("kvstore.remove_failed", log::F("chunks", batch.size()), log::F("cause", status));
    }
  }
  return records.size();
}

absl::StatusOr<TieredStore::Pinned> TieredStore::SetPin(std::span<const chunk::ChunkKey> keys, chunk::Pin pin) {
  std::vector<std::shared_ptr<ChunkRecord>> records;
  size_t num_missing = 0;
  for (const chunk::ChunkKey& key : keys) {
    std::shared_ptr<ChunkRecord> record = FindLive(key);
    if (record != nullptr && Visible(key)) {
      records.push_back(std::move(record));
    } else {
      ++num_missing;
    }
  }
  SPLICE_ASSIGN_OR_RETURN(Pinned pinned, ApplyPin(records, pin));
  pinned.num_missing = num_missing;
  return pinned;
}

absl::StatusOr<TieredStore::Pinned> TieredStore::SetNamespacePin(const chunk::Digest& id, chunk::Pin pin) {
  SPLICE_ASSIGN_OR_RETURN(const Namespace::Stat stat, namespaces_.Stat(id));
  NamespaceSettings settings = stat.row.settings;
  settings.pin = pin;
  SPLICE_RETURN_IF_ERROR(namespaces_.Set(id, settings).status());
  return ApplyPin(catalog_.Select([&](const ChunkRecord& r) { return r.owner->id == id && !r.owner->dead(); }), pin);
}

absl::StatusOr<TieredStore::Pinned> TieredStore::ApplyPin(const std::vector<std::shared_ptr<ChunkRecord>>& records,
                                                          chunk::Pin pin) {
  Pinned pinned;
  for (const std::shared_ptr<ChunkRecord>& record : records) {
    if (record->pin.exchange(pin) != pin) ++pinned.num_changed;
    memory_tier_->Reposition(record->key);
  }
  for (size_t at = 0; disk_ != nullptr && at < records.size(); at += kRemoveBatch) {
    std::vector<chunk::ChunkKey> keys;
    for (size_t i = at; i < std::min(records.size(), at + kRemoveBatch); ++i) keys.push_back(records[i]->key);
    SPLICE_RETURN_IF_ERROR(disk_->SavePins(keys));
  }
  return pinned;
}

void TieredStore::OnBatch(const WriteBehind::Batch& batch) {
  if (!batch.result.status.ok()) {
    metrics_->write_dropped.Increment(static_cast<double>(batch.result.num_failed));
    log::Warning("kvstore.write_failed", log::F("chunks", batch.result.num_failed),
                 log::F("cause", batch.result.status));
  }
  metrics_->write_seconds.Observe(batch.seconds);
  for (const StoredChunkRef& chunk : batch.chunks) {
    // The disk keeps it now: the memory may give a pinned one up.
    if (chunk->record->pin.load() != chunk::Pin::kNone) memory_tier_->Reposition(chunk->header.key);
  }
  UpdateGauges();
}

void TieredStore::Sweep() {
  if (!namespaces_.NeedsSweep()) return;
  const uint64_t now_ms = catalog_.NowMs();
  const auto over = catalog_.Select([&](const ChunkRecord& record) { return !record.Live(now_ms); });
  std::vector<std::shared_ptr<ChunkRecord>> stored;
  for (const std::shared_ptr<ChunkRecord>& record : over) {
    if (Visible(record->key)) stored.push_back(record);
  }
  metrics_->expired.Increment(static_cast<double>(RemoveAll(stored)));
}

void TieredStore::Maintain() {
  if (num_maintained_.fetch_add(1) % kSlowMaintenanceEvery == 0) {
    Sweep();
    if (disk_ != nullptr) {
      if (const absl::Status status = disk_->FlushUsage(kUsageRowsMax); !status.ok()) {
        log::Warning("kvstore.usage_not_saved", log::F("cause", status));
      }
    }
  }
  UpdateGauges();
}

bool TieredStore::Drain(std::chrono::steady_clock::time_point deadline) {
  return writes_ == nullptr || writes_->Drain(deadline);
}

void TieredStore::Stop() {
  if (writes_ == nullptr) return;
  writes_->Stop();
  if (const absl::Status status = disk_->FlushUsage(SIZE_MAX); !status.ok()) {
    log::Warning("kvstore.usage_not_saved", log::F("cause", status));
  }
}

TieredStore::Stats TieredStore::stats() const {
  Stats stats;
  stats.memory = memory_tier_->stats();
  stats.memory_capacity_bytes = options_.memory_bytes;
  if (disk_ != nullptr) {
    stats.disk = disk_->stats();
    stats.disk_capacity_bytes = options_.disk_bytes;
    stats.write_queue_chunks = writes_ == nullptr ? 0 : writes_->size();
  }
  stats.hits = static_cast<uint64_t>(metrics_->hits_memory.Value() + metrics_->hits_disk.Value());
  stats.misses = static_cast<uint64_t>(metrics_->misses.Value());
  stats.num_corrupt = stats.disk.num_corrupt + num_damaged_in_memory_.load();
  stats.num_expired = static_cast<uint64_t>(metrics_->expired.Value());
  return stats;
}

void TieredStore::CheckInvariants() const {
  memory_tier_->CheckInvariants();
  if (disk_ != nullptr) disk_->CheckInvariants();
}

void TieredStore::UpdateGauges() {
  const Stats now = stats();
  std::lock_guard lock(metrics_->update_mutex);
  metrics_->chunks_memory.Set(static_cast<double>(now.memory.num_chunks));
  metrics_->chunks_disk.Set(static_cast<double>(now.disk.num_chunks));
  metrics_->used_memory.Set(static_cast<double>(now.memory.bytes));
  metrics_->used_disk.Set(static_cast<double>(now.disk.bytes));
  metrics_->queue.Set(static_cast<double>(now.write_queue_chunks));
  RaiseTo(metrics_->evicted_memory, now.memory.num_evicted);
  RaiseTo(metrics_->evicted_disk, now.disk.num_evicted);
  RaiseTo(metrics_->corrupt, now.num_corrupt);
}

}  // namespace spl::kvstore
