#include "services/prefill_work/ticket_guard.h"

#include <algorithm>
#include <utility>

#include "services/base/status.h"

namespace spl::prefill {
namespace {

absl::Status Unflushed() {
  return absl::UnavailableError("the writes to the ticket's pages were not flushed: their channel was lost");
}

}  // namespace

void TicketGuard::Hold::End(bool quiet) {
  if (!ended_.exchange(true)) guard_.OnEnd(ticket_, quiet);
}

absl::StatusOr<std::unique_ptr<TicketGuard::Hold>> TicketGuard::Begin(const RandomId& ticket, CancelFlag cancelled) {
  std::lock_guard lock(mutex_);
  if (const auto it = revoked_.find(ticket); it != revoked_.end() && clock_.Now() < it->second) {
    ++num_refused_;
    return absl::AbortedError("the ticket was revoked before this call arrived: reserve another one");
  }
  const bool is_new = writing_.try_emplace(ticket, Writer{std::move(cancelled), {}}).second;
  // AlreadyExists, not Aborted: Aborted means that no write is in flight.
  if (!is_new) return absl::AlreadyExistsError("another call is writing to the ticket's pages");
  return std::make_unique<Hold>(*this, ticket);
}

absl::Status TicketGuard::Use(const RandomId& ticket) {
  std::lock_guard lock(mutex_);
  if (!used_.insert(ticket).second)
    return absl::AlreadyExistsError("the ticket was used for a prompt before: reserve another one");
  used_oldest_first_.push_back(ticket);
  if (used_oldest_first_.size() > options_.max_used) {
    used_.erase(used_oldest_first_.front());
    used_oldest_first_.pop_front();
  }
  return absl::OkStatus();
}

void TicketGuard::Revoke(const RandomId& ticket, std::chrono::milliseconds ttl, Done done) {
  absl::Status answer;
  {
    std::lock_guard lock(mutex_);
    const bool remembered = RememberLocked(ticket, ttl);
    const auto writer = writing_.find(ticket);
    if (writer != writing_.end()) writer->second.cancelled->store(true);
    if (!remembered) {
      answer = Errorf(absl::StatusCode::kResourceExhausted,
                      "{} revoked tickets are remembered, the limit: this one's pages have to wait until it expires",
                      revoked_.size());
    } else if (writer != writing_.end()) {
      writer->second.waiting.push_back(std::move(done));
      return;
    } else if (unflushed_.contains(ticket)) {
      answer = Unflushed();
    }
  }
  done(answer);
}

bool TicketGuard::RememberLocked(const RandomId& ticket, std::chrono::milliseconds ttl) {
  const SteadyTime now = clock_.Now();
  while (!expiries_.empty() && expiries_.begin()->first <= now) {
    const auto it = revoked_.find(expiries_.begin()->second);
    if (it != revoked_.end() && it->second <= now) revoked_.erase(it);
    expiries_.erase(expiries_.begin());
  }
  if (expiries_.size() >= options_.max_revoked) return false;
  const SteadyTime until = now + std::min(ttl, options_.max_ttl);
  SteadyTime& kept = revoked_[ticket];
  if (kept >= until) return true;
  kept = until;
  expiries_.emplace(until, ticket);
  return true;
}

void TicketGuard::OnEnd(const RandomId& ticket, bool quiet) {
  std::vector<Done> waiting;
  {
    std::lock_guard lock(mutex_);
    const auto writer = writing_.find(ticket);
    waiting.swap(writer->second.waiting);
    writing_.erase(writer);
    if (!quiet && unflushed_.insert(ticket).second) {
      unflushed_oldest_first_.push_back(ticket);
      // The channel of one that is so old has been closed long ago.
      if (unflushed_oldest_first_.size() > options_.max_used) {
        unflushed_.erase(unflushed_oldest_first_.front());
        unflushed_oldest_first_.pop_front();
      }
    }
  }
  const absl::Status answer = quiet ? absl::OkStatus() : Unflushed();
  for (const Done& done : waiting) done(answer);
}

TicketGuard::Stats TicketGuard::stats() const {
  std::lock_guard lock(mutex_);
  return {writing_.size(), revoked_.size(), num_refused_};
}

}  // namespace spl::prefill
