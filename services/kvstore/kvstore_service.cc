#include "services/kvstore/kvstore_service.h"

#include <atomic>

#include "services/base/grpc_status.h"
#include "services/base/status.h"
#include "services/chunk/remote/chunk_wire.h"

namespace spl::kvstore {
namespace {

constexpr int kMaxKeys = 1 << 16;  // 4 M tokens
constexpr std::chrono::milliseconds kRetryAfter{100};

template <typename Request>
absl::StatusOr<std::vector<chunk::ChunkKey>> KeysOf(const Request& request) {
  if (request.keys_size() > kMaxKeys) {
    return InvalidArgument("keys: {} are more than {}", request.keys_size(), kMaxKeys);
  }
  std::vector<chunk::ChunkKey> keys;
  keys.reserve(static_cast<size_t>(request.keys_size()));
  for (const std::string& bytes : request.keys()) {
    SPLICE_ASSIGN_OR_RETURN(const chunk::ChunkKey key, chunk::KeyFromBytes(bytes));
    keys.push_back(key);
  }
  return keys;
}

// Streams chunk after chunk: load on the pool, write part by part, load the next. One step runs at a time, so only
// `cancelled_` needs care.
class GetReactor final : public grpc::ServerWriteReactor<v1::ChunkPart> {
 public:
  GetReactor(TieredStore& store, WorkPool& pool, grpc::CallbackServerContext& context,
             const v1::GetChunksRequest& request)
      : store_(store), pool_(pool), context_(context), skip_missing_(request.skip_missing()) {
    absl::StatusOr<std::vector<chunk::ChunkKey>> keys = KeysOf(request);
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
      absl::StatusOr<std::shared_ptr<const chunk::Chunk>> found = store_.Get(keys_[next_++]);
      if (!found.ok()) return Finish(ToGrpcStatus(found.status()));
      if (*found == nullptr) {
        if (skip_missing_) continue;
        break;
      }
      chunk_ = std::move(found).value();
      cutter_.emplace(*chunk_);
      cutter_->Next(part_);
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
  std::shared_ptr<const chunk::Chunk> chunk_;
  std::optional<chunk::ChunkCutter> cutter_;
  v1::ChunkPart part_;
  std::atomic<bool> cancelled_{false};
};

class PutReactor final : public grpc::ServerReadReactor<v1::ChunkPart> {
 public:
  PutReactor(TieredStore& store, grpc::CallbackServerContext& context, v1::PutChunksResponse& response)
      : store_(store), context_(context), response_(response) {
    StartRead(&part_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {  // the client has sent everything, or is gone
      return assembler_.pending() ? End(InvalidArgument("the stream ended in the middle of a chunk"))
                                  : End(absl::OkStatus());
    }
    const absl::Status status = Take();
    if (!status.ok()) return End(status);
    StartRead(&part_);
  }
  void OnDone() override { delete this; }

 private:
  absl::Status Take() {
    SPLICE_ASSIGN_OR_RETURN(std::optional<chunk::Chunk> chunk, assembler_.Add(part_));
    if (!chunk.has_value()) return absl::OkStatus();
    SPLICE_ASSIGN_OR_RETURN(const TieredStore::PutResult result, store_.Put(std::move(*chunk)));
    if (result == TieredStore::PutResult::kStored) {
      response_.set_num_stored(response_.num_stored() + 1);
    } else {
      response_.set_num_existing(response_.num_existing() + 1);
    }
    return absl::OkStatus();
  }

  void End(const absl::Status& status) {
    if (status.code() == absl::StatusCode::kResourceExhausted) SetRetryAfter(context_, kRetryAfter);
    Finish(ToGrpcStatus(status));
  }

  TieredStore& store_;
  grpc::CallbackServerContext& context_;
  v1::PutChunksResponse& response_;
  chunk::ChunkAssembler assembler_;
  v1::ChunkPart part_;
};

}  // namespace

grpc::ServerUnaryReactor* KvStoreService::Contains(grpc::CallbackServerContext* context,
                                                   const v1::ContainsRequest* request, v1::ContainsResponse* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::StatusOr<std::vector<chunk::ChunkKey>> keys = KeysOf(*request);
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
  return new GetReactor(store_, pool_, *context, *request);
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
  response->set_corrupt_dropped(stats.disk.num_corrupt);
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

}  // namespace spl::kvstore
