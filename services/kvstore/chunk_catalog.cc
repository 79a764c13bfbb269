#include "services/kvstore/chunk_catalog.h"

#include <algorithm>

#include "services/base/status.h"
#include "services/chunk/chunk_header.h"

namespace spl::kvstore {

float EstimateCost(const chunk::ChunkHeader& header) {
  constexpr float kTokensPerSecond = 10'000;
  constexpr float kPositionOfDoublePrice = 16'384;
  const float middle = static_cast<float>(header.first_position) + static_cast<float>(header.num_tokens) / 2;
  return static_cast<float>(header.num_tokens) / kTokensPerSecond * (1 + middle / kPositionOfDoublePrice);
}

ChunkCatalog::ChunkCatalog(NamespaceTable& namespaces, const Clock& clock)
    : namespaces_(namespaces), clock_(clock), start_(clock.Now()), start_wall_(clock.WallNow()) {}

uint64_t ChunkCatalog::NowMs() const {
  const auto since = start_wall_.time_since_epoch() + (clock_.Now() - start_);
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(since).count());
}

// The namespace is charged already.
std::shared_ptr<ChunkRecord> ChunkCatalog::Make(const chunk::ChunkKey& key, std::shared_ptr<Namespace> owner,
                                                uint64_t payload_bytes, const ModelIdentity& model) {
  std::shared_ptr<ChunkRecord> record(new ChunkRecord, [this](ChunkRecord* ended) {
    Forget(*ended);
    std::shared_ptr<Namespace> owner = std::move(ended->owner);
    const bool was_last = owner->Discharge(ended->payload_bytes);
    delete ended;
    if (was_last) namespaces_.ForgetIfUnused(std::move(owner));
  });
  record->key = key;
  record->owner = std::move(owner);
  record->payload_bytes = payload_bytes;
  record->model = Intern(model);
  return record;
}

const ModelIdentity* ChunkCatalog::Intern(const ModelIdentity& model) {
  if (model == ModelIdentity()) return nullptr;
  std::lock_guard lock(models_mutex_);
  return &*models_.insert(model).first;
}

void ChunkCatalog::Forget(const ChunkRecord& record) {
  Shard& shard = ShardOf(record.key);
  std::lock_guard lock(shard.mutex);
  const auto found = shard.places.find(record.key);
  if (found != shard.places.end() && found->second.address == &record) shard.places.erase(found);
}

absl::StatusOr<std::shared_ptr<ChunkRecord>> ChunkCatalog::Admit(const chunk::ChunkHeader& header,
                                                                 const chunk::PutOptions& options) {
  SPLICE_ASSIGN_OR_RETURN(std::shared_ptr<Namespace> owner,
                          namespaces_.Use(header.namespace_id, options.require_namespace));
  const chunk::Pin pin = std::max(options.pin, owner->default_pin());
  const uint64_t now_ms = NowMs();
  std::shared_ptr<ChunkRecord> existing = Find(header.key);
  if (existing == nullptr || !existing->Live(now_ms)) {
    SPLICE_RETURN_IF_ERROR(owner->Charge(header.payload_bytes, true));
    std::shared_ptr<ChunkRecord> made =
        Make(header.key, std::move(owner), header.payload_bytes, {header.model_fingerprint, header.layout_digest});
    made->created_ms = now_ms;
    made->cost_seconds = header.recompute_seconds > 0 ? header.recompute_seconds : EstimateCost(header);
    made->pin.store(pin);
    existing = nullptr;
    Shard& shard = ShardOf(header.key);
    std::shared_ptr<ChunkRecord> winner;  // ends outside the lock, should it end here
    {
      std::lock_guard lock(shard.mutex);
      Place& place = shard.places[header.key];
      winner = place.record.lock();
      if (winner == nullptr || !winner->Live(now_ms)) place = {made, made.get()};
    }
    if (winner == nullptr || !winner->Live(now_ms)) return made;
    existing = std::move(winner);  // another put of the same chunk came first
  }
  if (owner != nullptr) namespaces_.ForgetIfUnused(std::move(owner));
  if (existing->model != nullptr) {
    chunk::ChunkHeader theirs;
    theirs.key = header.key;
    theirs.model_fingerprint = existing->model->model_fingerprint;
    theirs.layout_digest = existing->model->layout_digest;
    SPLICE_RETURN_IF_ERROR(chunk::CheckSameModel(theirs, header.model_fingerprint, header.layout_digest));
  }
  if (pin > existing->pin.load()) existing->pin.store(pin);
  return existing;
}

std::shared_ptr<ChunkRecord> ChunkCatalog::Restore(const IndexEntry& row) {
  std::shared_ptr<Namespace> owner = namespaces_.Adopt(row.namespace_id, row.incarnation);
  (void)owner->Charge(row.payload_bytes, false);
  std::shared_ptr<ChunkRecord> record =
      Make(row.key, std::move(owner), row.payload_bytes, {row.model_fingerprint, row.layout_digest});
  record->created_ms = row.created_ms;
  record->cost_seconds = row.cost_seconds;
  record->pin.store(row.pin);
  record->uses.store(row.uses);
  Shard& shard = ShardOf(row.key);
  std::lock_guard lock(shard.mutex);
  shard.places[row.key] = {record, record.get()};
  return record;
}

std::shared_ptr<ChunkRecord> ChunkCatalog::Find(const chunk::ChunkKey& key) const {
  Shard& shard = ShardOf(key);
  std::lock_guard lock(shard.mutex);
  const auto found = shard.places.find(key);
  return found == shard.places.end() ? nullptr : found->second.record.lock();
}

std::vector<std::shared_ptr<ChunkRecord>> ChunkCatalog::Select(
    const std::function<bool(const ChunkRecord&)>& wanted) const {
  std::vector<std::shared_ptr<ChunkRecord>> selected;
  for (const Shard& shard : shards_) {
    std::vector<std::shared_ptr<ChunkRecord>> all;  // released outside the lock
    {
      std::lock_guard lock(shard.mutex);
      all.reserve(shard.places.size());
      for (const auto& named : shard.places) {
        if (std::shared_ptr<ChunkRecord> record = named.second.record.lock()) all.push_back(std::move(record));
      }
    }
    for (std::shared_ptr<ChunkRecord>& record : all) {
      if (wanted(*record)) selected.push_back(std::move(record));
    }
  }
  return selected;
}

}  // namespace spl::kvstore
