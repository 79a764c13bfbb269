#include "services/kvstore/write_behind.h"

#include "services/base/status.h"

namespace spl::kvstore {
namespace {

// One group commit: enough to hide the sync, little enough to be on disk soon.
constexpr size_t kBatchChunks = 256;
constexpr uint64_t kBatchBytes = 64 << 20;

}  // namespace

WriteBehind::WriteBehind(DiskTier& disk, const WriteBehindOptions& options, std::function<void(const Batch&)> on_batch)
    : disk_(disk), options_(options), on_batch_(std::move(on_batch)), queue_(options.max_chunks) {
  writer_ = std::thread([this] { Loop(); });
}

WriteBehind::~WriteBehind() { Stop(); }

bool WriteBehind::Push(const StoredChunkRef& chunk, Durable durable) {
  const uint64_t bytes = chunk->header.payload_bytes;
  std::lock_guard lock(mutex_);
  const auto waiting = pending_.find(chunk->header.key);
  // The same life of the chunk: one of a deleted namespace does not stand for its successor.
  if (waiting != pending_.end() && waiting->second.chunk->record == chunk->record) {
    if (durable) waiting->second.durable.push_back(std::move(durable));
    return true;
  }
  if (waiting != pending_.end() || pending_bytes_ + bytes > options_.max_bytes || !queue_.TryPush(chunk)) return false;
  Pending& pending = pending_[chunk->header.key];
  pending.chunk = chunk;
  if (durable) pending.durable.push_back(std::move(durable));
  pending_bytes_ += bytes;
  return true;
}

StoredChunkRef WriteBehind::Find(const chunk::ChunkKey& key) const {
  std::lock_guard lock(mutex_);
  const auto found = pending_.find(key);
  return found == pending_.end() ? nullptr : found->second.chunk;
}

size_t WriteBehind::size() const {
  std::lock_guard lock(mutex_);
  return pending_.size();
}

void WriteBehind::Loop() {
  for (;;) {
    std::vector<StoredChunkRef> batch;
    uint64_t bytes = 0;
    auto next = queue_.Pop(std::chrono::seconds(1));
    while (next.has_value()) {
      bytes += (*next)->header.payload_bytes;
      batch.push_back(std::move(*next));
      next = batch.size() < kBatchChunks && bytes < kBatchBytes ? queue_.TryPop() : std::nullopt;
    }
    if (!batch.empty()) {
      WriteBatch(batch);
    } else if (queue_.closed()) {
      return;
    }
  }
}

void WriteBehind::WriteBatch(const std::vector<StoredChunkRef>& batch) {
  const auto start = std::chrono::steady_clock::now();
  const DiskTier::WriteResult result = disk_.Write(batch);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  on_batch_({batch, result, taken.count()});
  std::vector<std::pair<Durable, absl::Status>> answers;
  {
    std::lock_guard lock(mutex_);
    for (const StoredChunkRef& chunk : batch) {
      const auto found = pending_.find(chunk->header.key);
      absl::Status status;
      if (!chunk->record->on_disk.load()) {
        status = result.status.ok() ? Errorf(absl::StatusCode::kResourceExhausted,
                                             "chunk {} was written and had to make room at once: the disk tier is too "
                                             "small, or its namespace was deleted",
                                             chunk->header.key.ToHex())
                                    : result.status;
      }
      for (Durable& durable : found->second.durable) answers.emplace_back(std::move(durable), status);
      pending_bytes_ -= chunk->header.payload_bytes;
      pending_.erase(found);
    }
  }
  changed_.notify_all();
  for (auto& [durable, status] : answers) durable(status);
}

bool WriteBehind::Drain(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [&] { return pending_.empty(); });
}

void WriteBehind::Stop() {
  queue_.Close();
  if (writer_.joinable()) writer_.join();
}

}  // namespace spl::kvstore
