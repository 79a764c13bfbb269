#include "services/kvstore/put_table.h"

#include <algorithm>

#include "services/base/status.h"

namespace spl::kvstore {

absl::StatusOr<PutTable::Grant> PutTable::Add(std::vector<PreparedPut> puts, std::chrono::milliseconds ttl) {
  const Grant grant{RandomId::Make(), ttl.count() <= 0 ? options_.default_ttl : std::min(ttl, options_.max_ttl)};
  Reservation reservation;
  for (const PreparedPut& put : puts) reservation.bytes += put.slot.has_value() ? put.slot->size() : 0;
  reservation.puts = std::move(puts);
  reservation.ttl = grant.ttl;
  reservation.expires = clock_.Now() + grant.ttl;
  std::lock_guard lock(mutex_);
  if (reservations_.size() >= options_.max_reservations) {
    return Errorf(absl::StatusCode::kResourceExhausted, "{} puts are reserved, the limit", reservations_.size());
  }
  if (reserved_bytes_ + quarantined_bytes_ + reservation.bytes > options_.max_bytes) {
    return Errorf(absl::StatusCode::kResourceExhausted,
                  "{} bytes are reserved by puts and {} in quarantine, {} more are over the limit of {}",
                  reserved_bytes_, quarantined_bytes_, reservation.bytes, options_.max_bytes);
  }
  reserved_bytes_ += reservation.bytes;
  reservations_.emplace(grant.id, std::move(reservation));
  return grant;
}

absl::StatusOr<std::vector<PreparedPut>> PutTable::Take(const RandomId& id) {
  std::lock_guard lock(mutex_);
  const auto found = reservations_.find(id);
  if (found == reservations_.end() || found->second.expires <= clock_.Now()) {
    return Errorf(absl::StatusCode::kNotFound, "put reservation {} has expired or never was; reserve again",
                  id.ToHex());
  }
  std::vector<PreparedPut> puts = std::move(found->second.puts);
  reserved_bytes_ -= found->second.bytes;
  reservations_.erase(found);
  return puts;
}

void PutTable::Abort(const RandomId& id, bool writer_quiet) {
  Reservation ended;  // its memory comes back outside the lock
  std::lock_guard lock(mutex_);
  const auto found = reservations_.find(id);
  if (found == reservations_.end()) return;
  ended = std::move(found->second);
  reservations_.erase(found);
  reserved_bytes_ -= ended.bytes;
  if (!writer_quiet) QuarantineLocked(std::move(ended));
}

void PutTable::QuarantineLocked(Reservation reservation) {
  if (reservation.bytes == 0) return;  // nothing of it can be written
  quarantined_bytes_ += reservation.bytes;
  // The memory waits, the promise does not: the chunks' share of the quota is free again.
  for (PreparedPut& put : reservation.puts) put.record.reset();
  quarantine_.push_back({std::move(reservation.puts), reservation.bytes, reservation.expires + reservation.ttl});
}

void PutTable::Expire() {
  std::vector<Quarantined> freed;
  std::lock_guard lock(mutex_);
  const SteadyTime now = clock_.Now();
  for (auto at = reservations_.begin(); at != reservations_.end();) {
    if (at->second.expires > now) {
      ++at;
      continue;
    }
    ++num_expired_;
    reserved_bytes_ -= at->second.bytes;
    QuarantineLocked(std::move(at->second));
    at = reservations_.erase(at);
  }
  const auto over = [&](const Quarantined& quarantined) { return quarantined.until <= now; };
  const auto first_over =
      std::stable_partition(quarantine_.begin(), quarantine_.end(), [&](const auto& q) { return !over(q); });
  for (auto at = first_over; at != quarantine_.end(); ++at) {
    quarantined_bytes_ -= at->bytes;
    freed.push_back(std::move(*at));
  }
  quarantine_.erase(first_over, quarantine_.end());
}

PutTable::Stats PutTable::stats() const {
  std::lock_guard lock(mutex_);
  return {reservations_.size(), reserved_bytes_, quarantined_bytes_, num_expired_};
}

}  // namespace spl::kvstore
