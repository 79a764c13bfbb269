#include "services/kvstore/kvstore_service.h"

#include <atomic>
#include <mutex>

#include "services/base/fault_point.h"
#include "services/base/grpc_status.h"
#include "services/base/grpc_trace.h"
#include "services/base/status.h"
#include "services/chunk/remote/chunk_wire.h"

namespace spl::kvstore {
namespace {

FaultPoint get_fault("kvstore.get");        // delays between finding a chunk and looking at its bytes
FaultPoint stream_fault("kvstore.stream");  // corrupt: a part changes before it is sent

constexpr std::chrono::milliseconds kRetryAfter{100};

// Streams chunk after chunk: load on the pool, write part by part, load the next. One step runs at a time, so only
// `cancelled_` needs care.
class GetReactor final : public grpc::ServerWriteReactor<v1::ChunkPart> {
 public:
  GetReactor(TieredStore& store, WorkPool& pool, grpc::CallbackServerContext& context,
             const v1::GetChunksRequest& request, Span span)
      : store_(store), pool_(pool), context_(context), skip_missing_(request.skip_missing()), span_(std::move(span)) {
    absl::StatusOr<std::vector<chunk::ChunkKey>> keys = chunk::KeysFromWire(request.keys());
    if (!keys.ok()) {
      Finish(ToGrpcStatus(keys.status()));
      return;
    }
    keys_ = std::move(keys).value();
    LoadSoon();
  }

  void OnWriteDone(bool ok) override {
    if (!ok || cancelled_.load()) return Finish(grpc::Status::CANCELLED);
    if (cutter_->Next(part_)) return StartWrite(&part_);
    LoadSoon();
  }
  void OnCancel() override { cancelled_.store(true); }
  void OnDone() override { delete this; }

 private:
  void LoadSoon() {
    if (next_ == keys_.size()) return Finish(grpc::Status::OK);
    if (pool_.Submit([this] { Load(); })) return;
    SetRetryAfter(context_, kRetryAfter);
    Finish(ToGrpcStatus(Errorf(absl::StatusCode::kResourceExhausted, "too many reads are waiting")));
  }

  void Load() {
    while (next_ < keys_.size()) {
      if (cancelled_.load()) return Finish(grpc::Status::CANCELLED);
      const chunk::ChunkKey& key = keys_[next_++];
      absl::StatusOr<StoredChunkRef> found = store_.Get(key);
      if (get_fault.armed()) (void)get_fault.Hit();
      // Memory can rot as well as disks. The bytes at hand count, not those that the store has by now: a reader by RMA
      // may have had them dropped since. A second look finds the disk's copy, or none.
      if (found.ok() && *found != nullptr && store_.DropIfDamaged(*found)) {
        found = store_.Get(key);
        // If the disk does not have the chunk yet, the queued copy is the same one.
        if (found.ok() && *found != nullptr && store_.DropIfDamaged(*found)) *found = nullptr;
      }
      if (!found.ok()) return Finish(ToGrpcStatus(found.status()));
      if (*found == nullptr) {
        if (skip_missing_) continue;
        break;
      }
      chunk_ = std::move(found).value();
      cutter_.emplace(chunk_->header, chunk_->payload());
      cutter_->Next(part_);
      if (stream_fault.armed() && stream_fault.Hit().corrupt) (*part_.mutable_data())[0] ^= 1;
      return StartWrite(&part_);
    }
    Finish(grpc::Status::OK);
  }

  TieredStore& store_;
  WorkPool& pool_;
  grpc::CallbackServerContext& context_;
  const bool skip_missing_;
  std::vector<chunk::ChunkKey> keys_;
  size_t next_ = 0;
  StoredChunkRef chunk_;
  std::optional<chunk::ChunkCutter> cutter_;
  v1::ChunkPart part_;
  std::atomic<bool> cancelled_{false};
  const Span span_;  // ends with the call
};

// Takes chunk after chunk and answers when all are stored, or, of a durable put, on disk. While more than a few tens of
// MiB wait for the disk no further part is read, so that the client feels the disk's pace.
class PutReactor final : public grpc::ServerReadReactor<v1::ChunkPart> {
 public:
  PutReactor(TieredStore& store, grpc::CallbackServerContext& context, v1::PutChunksResponse& response)
      : store_(store), context_(context), response_(response) {
    StartRead(&part_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {  // the client has sent everything, or is gone
      return End(assembler_.pending() ? InvalidArgument("the stream ended in the middle of a chunk")
                                      : absl::OkStatus());
    }
    if (const absl::Status status = Take(); !status.ok()) return End(status);
    {
      std::lock_guard lock(mutex_);
      reading_ = waiting_bytes_ <= kWaitingBytesMax;
      if (!reading_) return;  // the disk's next answer reads on
    }
    StartRead(&part_);
  }
  void OnDone() override { delete this; }

 private:
  static constexpr uint64_t kWaitingBytesMax = 32 << 20;

  absl::Status Take() {
    if (part_.has_options()) {
      SPLICE_ASSIGN_OR_RETURN(options_, chunk::PutOptionsFromWire(part_.options()));
    }
    SPLICE_ASSIGN_OR_RETURN(std::optional<chunk::Chunk> chunk, assembler_.Add(part_));
    if (!chunk.has_value()) return absl::OkStatus();
    const uint64_t bytes = chunk->payload.size();
    {
      std::lock_guard lock(mutex_);
      ++outstanding_;
      waiting_bytes_ += bytes;
    }
    const absl::StatusOr<TieredStore::PutResult> result =
        store_.Put(*chunk, options_, [this, bytes](absl::Status status) { OnDurable(bytes, status); });
    if (!result.ok()) {  // OnDurable does not come; the stream itself is still outstanding
      std::lock_guard lock(mutex_);
      --outstanding_;
      return result.status();
    }
    if (*result == TieredStore::PutResult::kStored) {
      response_.set_num_stored(response_.num_stored() + 1);
    } else {
      response_.set_num_existing(response_.num_existing() + 1);
    }
    return absl::OkStatus();
  }

  void OnDurable(uint64_t bytes, const absl::Status& status) {
    bool read_on;
    {
      std::lock_guard lock(mutex_);
      if (status.ok()) ++num_durable_;
      if (options_.durable) status_.Update(status);
      waiting_bytes_ -= bytes;
      read_on = !reading_ && waiting_bytes_ <= kWaitingBytesMax / 2;
      reading_ = reading_ || read_on;
    }
    if (read_on) StartRead(&part_);
    Release();
  }

  void End(const absl::Status& status) {
    {
      std::lock_guard lock(mutex_);
      status_.Update(status);
    }
    Release();
  }

  // The stream and every chunk that waits hold the reactor; the last one to let go answers.
  void Release() {
    {
      std::lock_guard lock(mutex_);
      if (--outstanding_ > 0) return;
    }
    response_.set_num_durable(num_durable_);
    if (status_.code() == absl::StatusCode::kResourceExhausted) SetRetryAfter(context_, kRetryAfter);
    Finish(ToGrpcStatus(status_));
  }

  TieredStore& store_;
  grpc::CallbackServerContext& context_;
  v1::PutChunksResponse& response_;
  chunk::PutOptions options_;
  chunk::ChunkAssembler assembler_;
  v1::ChunkPart part_;
  std::mutex mutex_;  // guards all below
  absl::Status status_;
  uint32_t num_durable_ = 0;
  int outstanding_ = 1;
  uint64_t waiting_bytes_ = 0;
  bool reading_ = true;
};

}  // namespace

grpc::ServerUnaryReactor* KvStoreService::Contains(grpc::CallbackServerContext* context,
                                                   const v1::ContainsRequest* request, v1::ContainsResponse* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::StatusOr<std::vector<chunk::ChunkKey>> keys = chunk::KeysFromWire(request->keys());
  if (keys.ok()) {
    bool leading = true;
    for (const chunk::ChunkKey& key : *keys) {
      const bool present = store_.Contains(key);
      response->add_present(present);
      leading = leading && present;
      if (leading) response->set_num_leading(response->num_leading() + 1);
    }
  }
  reactor->Finish(ToGrpcStatus(keys.status()));
  return reactor;
}

grpc::ServerWriteReactor<v1::ChunkPart>* KvStoreService::Get(grpc::CallbackServerContext* context,
                                                             const v1::GetChunksRequest* request) {
  Span span(tracer_, "store.get", AcceptTrace(tracer_, *context), SpanKind::kServer);
  span.Set("splice.keys", int64_t{request->keys_size()});
  return new GetReactor(store_, pool_, *context, *request, std::move(span));
}

grpc::ServerReadReactor<v1::ChunkPart>* KvStoreService::Put(grpc::CallbackServerContext* context,
                                                            v1::PutChunksResponse* response) {
  return new PutReactor(store_, *context, *response);
}

grpc::ServerUnaryReactor* KvStoreService::GetStats(grpc::CallbackServerContext* context,
                                                   const v1::GetStoreStatsRequest*, v1::StoreStats* response) {
  const TieredStore::Stats stats = store_.stats();
  response->set_memory_chunks(stats.memory.num_chunks);
  response->set_memory_bytes(stats.memory.bytes);
  response->set_memory_capacity_bytes(stats.memory_capacity_bytes);
  response->set_disk_chunks(stats.disk.num_chunks);
  response->set_disk_bytes(stats.disk.bytes);
  response->set_disk_capacity_bytes(stats.disk_capacity_bytes);
  response->set_hits(stats.hits);
  response->set_misses(stats.misses);
  response->set_corrupt_dropped(stats.num_corrupt);
  response->set_expired_dropped(stats.num_expired);
  response->set_write_queue_chunks(stats.write_queue_chunks);
  response->set_leases(leases_.stats().num_leases);
  response->set_reserved_bytes(puts_.stats().reserved_bytes);
  response->set_quarantined_bytes(puts_.stats().quarantined_bytes);
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

}  // namespace spl::kvstore
