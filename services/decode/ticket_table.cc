#include "services/decode/ticket_table.h"

#include <utility>
#include <vector>

#include "services/base/check.h"
#include "services/base/status.h"

namespace spl::decode {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kExpireEvery{200};
constexpr std::chrono::seconds kAskEvery{2};

absl::Status UnknownTicket() {
  return absl::NotFoundError("the ticket is unknown: it has expired, was released, or belongs to an earlier process");
}

absl::Status OtherGeneration() {
  return absl::FailedPreconditionError("the ticket's generation differs: it is not the one that was reserved");
}

}  // namespace

std::vector<int32_t> Ticket::SentPages() const {
  if (held_pages == 0) return kv->AllPages();
  std::vector<int32_t> pages;
  for (const std::vector<int32_t>& stream : kv->streams())
    pages.insert(pages.end(), stream.begin() + held_pages, stream.end());
  return pages;
}

TicketTable::TicketTable(size_t max_tickets, WriterProofs* proofs, std::chrono::milliseconds unread_for)
    : max_tickets_(max_tickets), proofs_(proofs), unread_for_(unread_for), thread_([this] { ExpireLoop(); }) {}

TicketTable::~TicketTable() { SPLICE_CHECK(!thread_.joinable(), "Stop() was not called"); }

absl::StatusOr<uint64_t> TicketTable::Add(std::unique_ptr<Ticket> ticket) {
  std::lock_guard lock(mutex_);
  if (stopping_) return absl::UnavailableError("the decode worker is stopping");
  if (tickets_.size() >= max_tickets_)
    return Errorf(absl::StatusCode::kResourceExhausted, "the decode worker has {} sequences, its limit",
                  tickets_.size());
  const uint64_t generation = next_generation_++;
  ticket->generation = generation;
  ticket->expires = Clock::now() + ticket->ttl;
  ticket->ask_at = ticket->expires;
  const RandomId id = ticket->id;
  tickets_.emplace(id, std::move(ticket));
  return generation;
}

absl::StatusOr<Ticket*> TicketTable::BeginLanding(const RandomId& id, uint64_t generation) {
  std::unique_ptr<Ticket> gone;  // its pages go back without the lock
  std::lock_guard lock(mutex_);
  const auto it = tickets_.find(id);
  if (it == tickets_.end()) return UnknownTicket();
  Ticket& ticket = *it->second;
  if (ticket.generation != generation) return OtherGeneration();
  if (ticket.state == TicketState::kQuarantined) {
    // Too late to be decoded, but the writer has flushed before it committed.
    gone = std::move(it->second);
    tickets_.erase(it);
    changed_.notify_all();
    return UnknownTicket();
  }
  if (ticket.state != TicketState::kReserved) return absl::AlreadyExistsError("the ticket was committed before");
  ticket.state = TicketState::kLanding;
  return &ticket;
}

bool TicketTable::MarkRunning(const RandomId& id) {
  std::lock_guard lock(mutex_);
  const auto it = tickets_.find(id);
  if (it == tickets_.end()) return false;
  it->second->state = TicketState::kRunning;
  return true;
}

absl::StatusOr<std::shared_ptr<TokenStream>> TicketTable::FindStream(const RandomId& id, uint64_t generation) {
  std::lock_guard lock(mutex_);
  if (const auto unread = unread_.find(id); unread != unread_.end() && unread->second.generation == generation)
    return std::move(unread_.extract(unread).mapped().stream);
  const auto it = tickets_.find(id);
  if (it == tickets_.end() || it->second->state == TicketState::kQuarantined) return UnknownTicket();
  if (it->second->generation != generation) return OtherGeneration();
  return it->second->stream;
}

void TicketTable::Release(const RandomId& id, uint64_t generation, bool writer_quiet, const absl::Status& why) {
  std::unique_ptr<Ticket> gone;
  std::shared_ptr<TokenStream> stream;
  bool cancelled = false;
  {
    std::lock_guard lock(mutex_);
    if (const auto unread = unread_.find(id); unread != unread_.end() && unread->second.generation == generation)
      unread_.erase(unread);
    const auto it = tickets_.find(id);
    if (it == tickets_.end() || it->second->generation != generation) return;
    Ticket& ticket = *it->second;
    ticket.cancelled->store(true);
    if (ticket.state == TicketState::kReserved || ticket.state == TicketState::kQuarantined) {
      stream = ticket.stream;
      if (writer_quiet || ticket.in_place) {
        gone = std::move(it->second);
        tickets_.erase(it);
        changed_.notify_all();
      } else {
        ticket.state = TicketState::kQuarantined;
        changed_.notify_all();
      }
    } else {
      cancelled = true;
    }
  }
  if (stream) stream->End(why);
  if (cancelled && on_cancel_) on_cancel_();
}

void TicketTable::Drop(const RandomId& id, const absl::Status& why) {
  std::unique_ptr<Ticket> gone;
  {
    std::lock_guard lock(mutex_);
    const auto it = tickets_.find(id);
    if (it == tickets_.end()) return;
    gone = std::move(it->second);
    tickets_.erase(it);
    // In the same moment: a reader that comes now finds the one or the other.
    if (!gone->cancelled->load() && unread_.size() < max_tickets_)
      unread_[id] = {gone->generation, gone->stream, Clock::now() + unread_for_};
    changed_.notify_all();
  }
  const std::shared_ptr<TokenStream> stream = gone->stream;
  const uint64_t generation = gone->generation;
  gone.reset();  // pages are free before the end is reported
  stream->End(why);
  if (!stream->has_reader()) return;
  std::lock_guard lock(mutex_);
  if (const auto read = unread_.find(id); read != unread_.end() && read->second.generation == generation)
    unread_.erase(read);
}

TicketCounts TicketTable::counts() const {
  std::lock_guard lock(mutex_);
  return CountLocked();
}

void TicketTable::WaitIdle(Clock::time_point deadline) const {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [&] {
    const TicketCounts counts = CountLocked();
    return counts.reserved + counts.running == 0;
  });
}

TicketCounts TicketTable::CountLocked() const {
  TicketCounts counts{.expired_total = expired_total_, .cut_total = cut_total_};
  const auto now = Clock::now();
  for (const auto& [id, ticket] : tickets_) {
    if (ticket->state == TicketState::kReserved || ticket->state == TicketState::kLanding) ++counts.reserved;
    if (ticket->state == TicketState::kRunning) ++counts.running;
    if (ticket->state == TicketState::kQuarantined) ++counts.quarantined;
    if (ticket->state == TicketState::kQuarantined && now >= ticket->expires + ticket->ttl + kAskEvery) ++counts.stuck;
  }
  return counts;
}

void TicketTable::ExpireLoop() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(lock, kExpireEvery, [&] { return stopping_; });
    if (stopping_) return;
    lock.unlock();
    ExpireOnce(Clock::now());
    LookForProofs(Clock::now());
    lock.lock();
  }
}

void TicketTable::ExpireOnce(Clock::time_point now) {
  std::vector<std::shared_ptr<TokenStream>> ended;
  std::vector<std::unique_ptr<Ticket>> gone;  // their pages go back without the lock
  {
    std::lock_guard lock(mutex_);
    std::erase_if(unread_, [&](const auto& unread) { return now >= unread.second.until; });
    for (auto it = tickets_.begin(); it != tickets_.end();) {
      const auto at = it++;
      Ticket& ticket = *at->second;
      if (ticket.state != TicketState::kReserved || now < ticket.expires) continue;
      ++expired_total_;
      changed_.notify_all();
      ended.push_back(ticket.stream);
      ticket.state = TicketState::kQuarantined;
      if (!ticket.in_place) continue;
      gone.push_back(std::move(at->second));
      tickets_.erase(at);
    }
  }
  gone.clear();
  for (const auto& stream : ended)
    stream->End(absl::DeadlineExceededError("the ticket expired before the prompt's KV was committed"));
}

void TicketTable::LookForProofs(Clock::time_point now) {
  if (proofs_ == nullptr) return;
  std::vector<std::unique_ptr<Ticket>> gone;
  std::vector<std::pair<RandomId, uint64_t>> to_ask;
  std::vector<TicketWriter> writers;
  {
    std::lock_guard lock(mutex_);
    for (auto it = tickets_.begin(); it != tickets_.end();) {
      Ticket& ticket = *it->second;
      if (ticket.state == TicketState::kQuarantined && proofs_->Gone(ticket.writer)) {
        gone.push_back(std::move(it->second));
        it = tickets_.erase(it);
        continue;
      }
      if (ticket.state == TicketState::kQuarantined && now >= ticket.ask_at) {
        ticket.ask_at = now + kAskEvery;
        to_ask.emplace_back(ticket.id, ticket.generation);
        writers.push_back(ticket.writer);
      }
      if (ticket.state == TicketState::kQuarantined && now >= ticket.expires + ticket.ttl && !ticket.cut &&
          proofs_->Cut(ticket.writer)) {
        ticket.cut = true;
        ++cut_total_;
      }
      ++it;
    }
    if (!gone.empty()) changed_.notify_all();
  }
  for (size_t i = 0; i < to_ask.size(); ++i) {
    const auto& [ticket, its_generation] = to_ask[i];
    (void)proofs_->Ask(writers[i], ticket, [this, id = ticket, generation = its_generation] {
      Release(id, generation, true, absl::CancelledError("its writer is quiet"));
    });
  }
}

void TicketTable::Stop(const absl::Status& why) {
  std::unordered_map<RandomId, std::unique_ptr<Ticket>, RandomIdHash> gone;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    gone.swap(tickets_);
    unread_.clear();
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  for (auto& [id, ticket] : gone) {
    ticket->kv.reset();
    ticket->spare.reset();
    ticket->stream->End(why);
  }
}

}  // namespace spl::decode
