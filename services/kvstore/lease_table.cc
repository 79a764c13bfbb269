#include "services/kvstore/lease_table.h"

#include <algorithm>
#include <unordered_set>

#include "services/base/status.h"

namespace spl::kvstore {

std::chrono::milliseconds LeaseTable::Clamp(std::chrono::milliseconds ttl) const {
  return ttl.count() <= 0 ? options_.default_ttl : std::min(ttl, options_.max_ttl);
}

absl::StatusOr<LeaseTable::Grant> LeaseTable::Take(std::vector<StoredChunkRef> chunks, std::chrono::milliseconds ttl) {
  const Grant grant{RandomId::Make(), Clamp(ttl)};
  Lease lease;
  for (const StoredChunkRef& chunk : chunks) lease.bytes += chunk->header.payload_bytes;
  lease.chunks = std::move(chunks);
  lease.expires = clock_.Now() + grant.ttl;
  lease.ends = clock_.Now() + options_.max_life;
  std::lock_guard lock(mutex_);
  if (leases_.size() >= options_.max_leases) {
    return Errorf(absl::StatusCode::kResourceExhausted, "{} leases are out, the limit", leases_.size());
  }
  if (!leases_.empty() && bytes_ + lease.bytes > options_.max_bytes) {
    return Errorf(absl::StatusCode::kResourceExhausted, "{} bytes are under lease, {} more are over the limit of {}",
                  bytes_, lease.bytes, options_.max_bytes);
  }
  bytes_ += lease.bytes;
  leases_.emplace(grant.id, std::move(lease));
  return grant;
}

absl::StatusOr<std::chrono::milliseconds> LeaseTable::Renew(const RandomId& id, std::chrono::milliseconds ttl) {
  std::lock_guard lock(mutex_);
  const auto found = leases_.find(id);
  if (found == leases_.end() || found->second.expires <= clock_.Now()) {
    return Errorf(absl::StatusCode::kNotFound, "lease {} has ended; what was copied under it must not be used",
                  id.ToHex());
  }
  const SteadyTime now = clock_.Now();
  found->second.expires = std::min(now + Clamp(ttl), found->second.ends);
  return std::chrono::duration_cast<std::chrono::milliseconds>(found->second.expires - now);
}

std::vector<chunk::ChunkKey> LeaseTable::HeldOf(const RandomId& id, std::span<const chunk::ChunkKey> keys) const {
  std::vector<chunk::ChunkKey> held;
  std::lock_guard lock(mutex_);
  const auto found = leases_.find(id);
  if (found == leases_.end()) return held;
  const std::unordered_set<chunk::ChunkKey, chunk::ChunkKeyHash> wanted(keys.begin(), keys.end());
  for (const StoredChunkRef& chunk : found->second.chunks) {
    if (wanted.contains(chunk->header.key)) held.push_back(chunk->header.key);
  }
  return held;
}

void LeaseTable::Release(const RandomId& id) {
  Lease ended;  // lets go of its chunks outside the lock
  std::lock_guard lock(mutex_);
  const auto found = leases_.find(id);
  if (found == leases_.end()) return;
  ended = std::move(found->second);
  bytes_ -= ended.bytes;
  leases_.erase(found);
}

void LeaseTable::Expire() {
  std::vector<Lease> ended;
  std::lock_guard lock(mutex_);
  const SteadyTime now = clock_.Now();
  for (auto lease = leases_.begin(); lease != leases_.end();) {
    if (lease->second.expires > now) {
      ++lease;
      continue;
    }
    bytes_ -= lease->second.bytes;
    ++num_expired_;
    ended.push_back(std::move(lease->second));
    lease = leases_.erase(lease);
  }
}

LeaseTable::Stats LeaseTable::stats() const {
  std::lock_guard lock(mutex_);
  return {leases_.size(), bytes_, num_expired_};
}

}  // namespace spl::kvstore
