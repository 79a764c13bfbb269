#include "services/prefill_work/head_lease_table.h"

#include <algorithm>
#include <utility>

#include "services/base/status.h"

namespace spl::prefill {

std::shared_ptr<const LeasedHeads> LeasedHeads::Share(const engine::SequenceKv& kv,
                                                      const engine::StreamClasses& classes,
                                                      std::span<const int32_t> restored, uint64_t channel_id) {
  auto leased = std::shared_ptr<LeasedHeads>(new LeasedHeads(kv.pool(), channel_id));
  for (int32_t stream = 0; stream < kv.shape().num_streams(); ++stream) {
    const engine::PageHole hole = engine::HoleOf(classes[stream], kv.num_tokens());
    if (hole.size() == 0 || std::binary_search(restored.begin(), restored.end(), stream)) continue;
    const std::vector<int32_t>& pages = kv.streams()[stream];
    leased->heads_.push_back({stream, hole.begin, {pages.begin() + hole.begin, pages.begin() + hole.end}});
  }
  for (const Head& head : leased->heads_) kv.pool().Share(head.pages);
  return leased->heads_.empty() ? nullptr : leased;
}

LeasedHeads::~LeasedHeads() {
  for (const Head& head : heads_) pool_.Release(head.pages);
}

const LeasedHeads::Head* LeasedHeads::Find(int32_t stream) const {
  const auto head = std::lower_bound(heads_.begin(), heads_.end(), stream,
                                     [](const Head& h, int32_t wanted) { return h.stream < wanted; });
  return head == heads_.end() || head->stream != stream ? nullptr : &*head;
}

uint64_t LeasedHeads::num_bytes() const {
  uint64_t pages = 0;
  for (const Head& head : heads_) pages += head.pages.size();
  return pages * pool_.view().page_bytes();
}

absl::StatusOr<RandomId> HeadLeaseTable::Give(std::shared_ptr<const LeasedHeads> heads) {
  const uint64_t bytes = heads->num_bytes();
  std::lock_guard lock(mutex_);
  if (closed_) return absl::UnavailableError("the prefill worker is stopping");
  if (stats_.bytes + bytes > options_.max_bytes) {
    ++stats_.num_denied;
    return Errorf(absl::StatusCode::kResourceExhausted,
                  "{} bytes are under lease for decode workers, {} more would be over the limit of {}", stats_.bytes,
                  bytes, options_.max_bytes);
  }
  const RandomId id = RandomId::Make();
  leases_.emplace(id, Lease{std::move(heads), clock_.Now() + options_.ttl});
  stats_.bytes += bytes;
  ++stats_.num_leases;
  ++stats_.num_given;
  return id;
}

std::shared_ptr<const LeasedHeads> HeadLeaseTable::TakeLocked(Leases::iterator lease) {
  std::shared_ptr<const LeasedHeads> heads = std::move(lease->second.heads);
  leases_.erase(lease);
  --stats_.num_leases;
  stats_.bytes -= heads->num_bytes();
  return heads;
}

absl::StatusOr<std::shared_ptr<const LeasedHeads>> HeadLeaseTable::Renew(const RandomId& id) {
  std::lock_guard lock(mutex_);
  const auto lease = leases_.find(id);
  const SteadyTime now = clock_.Now();
  if (lease == leases_.end() || now >= lease->second.expires)
    return absl::NotFoundError("the lease on the heads of this prompt has ended");
  lease->second.expires = now + options_.ttl;
  return lease->second.heads;
}

void HeadLeaseTable::Release(const RandomId& id) {
  std::shared_ptr<const LeasedHeads> gone;
  std::lock_guard lock(mutex_);
  if (const auto lease = leases_.find(id); lease != leases_.end()) gone = TakeLocked(lease);
}

bool HeadLeaseTable::Expire() {
  std::vector<std::shared_ptr<const LeasedHeads>> gone;
  std::lock_guard lock(mutex_);
  const SteadyTime now = clock_.Now();
  for (auto lease = leases_.begin(); lease != leases_.end();) {
    const auto next = std::next(lease);
    if (now >= lease->second.expires) {
      gone.push_back(TakeLocked(lease));
      ++stats_.num_expired;
    }
    lease = next;
  }
  return !gone.empty();
}

bool HeadLeaseTable::ReclaimOne() {
  std::shared_ptr<const LeasedHeads> gone;
  std::lock_guard lock(mutex_);
  const auto first = std::min_element(leases_.begin(), leases_.end(),
                                      [](const auto& a, const auto& b) { return a.second.expires < b.second.expires; });
  if (first == leases_.end()) return false;
  gone = TakeLocked(first);
  ++stats_.num_reclaimed;
  return true;
}

void HeadLeaseTable::Close() {
  Leases gone;
  std::lock_guard lock(mutex_);
  closed_ = true;
  gone.swap(leases_);
  stats_.num_leases = stats_.bytes = 0;
}

HeadLeaseTable::Stats HeadLeaseTable::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace spl::prefill
