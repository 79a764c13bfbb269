#include "services/router/http/stored_responses.h"

#include <algorithm>
#include <utility>

namespace spl::router {

StoredResponses::StoredResponses(StoredResponsesOptions options, Metrics& metrics)
    : options_(options),
      entries_metric_(
          metrics.Gauge("splice_router_stored_responses", "Responses that a later request may go on with.")),
      bytes_metric_(metrics.Gauge("splice_router_stored_response_bytes", "Memory of these responses.")),
      missed_metric_(metrics.Counter("splice_router_stored_responses_missed_total",
                                     "Times that a response was asked for that is not kept.")) {}

void StoredResponses::Report() {
  entries_metric_.Set(static_cast<double>(entries_));
  bytes_metric_.Set(static_cast<double>(bytes_));
}

size_t StoredResponses::Entry::bytes() const { return sizeof(Entry) + 2 * id.size() + response->bytes(); }

void StoredResponses::DropFirst(Shelf& shelf) {
  Entry& first = shelf.entries.front();
  const size_t bytes = first.bytes();
  shelf.by_id.erase(first.id);
  shelf.entries.pop_front();
  shelf.bytes -= bytes;
  bytes_ -= bytes;
  --entries_;
}

void StoredResponses::DropExpired(Clock::time_point now) {
  for (auto it = shelves_.begin(); it != shelves_.end();) {
    Shelf& shelf = it->second;
    while (!shelf.entries.empty() && shelf.entries.front().used + options_.ttl <= now) DropFirst(shelf);
    it = shelf.entries.empty() ? shelves_.erase(it) : std::next(it);
  }
}

void StoredResponses::MakeRoom() {
  while (bytes_ > options_.max_bytes || entries_ > options_.max_entries) {
    const auto most = std::max_element(shelves_.begin(), shelves_.end(),
                                       [](const auto& a, const auto& b) { return a.second.bytes < b.second.bytes; });
    DropFirst(most->second);
    if (most->second.entries.empty()) shelves_.erase(most);
  }
}

void StoredResponses::Add(const Owner& owner, const std::string& id, StoredResponse response, Clock::time_point now) {
  if (!enabled()) return;
  Entry entry{.id = id, .response = std::make_shared<const StoredResponse>(std::move(response)), .used = now};
  const size_t bytes = entry.bytes();
  std::lock_guard lock(mutex_);
  DropExpired(now);
  Shelf& shelf = shelves_[owner];
  if (shelf.by_id.contains(id)) return;
  shelf.entries.push_back(std::move(entry));
  shelf.by_id[id] = std::prev(shelf.entries.end());
  shelf.bytes += bytes;
  bytes_ += bytes;
  ++entries_;
  MakeRoom();
  Report();
}

std::shared_ptr<const StoredResponse> StoredResponses::Find(const Owner& owner, const std::string& id,
                                                            Clock::time_point now) {
  std::lock_guard lock(mutex_);
  DropExpired(now);
  Report();
  std::shared_ptr<const StoredResponse> found = FindLocked(owner, id, now);
  if (found == nullptr) missed_metric_.Increment();
  return found;
}

std::shared_ptr<const StoredResponse> StoredResponses::FindLocked(const Owner& owner, const std::string& id,
                                                                  Clock::time_point now) {
  const auto shelf = shelves_.find(owner);
  if (shelf == shelves_.end()) return nullptr;
  const auto found = shelf->second.by_id.find(id);
  if (found == shelf->second.by_id.end()) return nullptr;
  std::list<Entry>& entries = shelf->second.entries;
  entries.splice(entries.end(), entries, found->second);
  found->second->used = now;
  return found->second->response;
}

bool StoredResponses::Erase(const Owner& owner, const std::string& id, Clock::time_point now) {
  std::lock_guard lock(mutex_);
  DropExpired(now);
  const auto shelf = shelves_.find(owner);
  if (shelf == shelves_.end()) return false;
  const auto found = shelf->second.by_id.find(id);
  if (found == shelf->second.by_id.end()) return false;
  std::list<Entry>& entries = shelf->second.entries;
  entries.splice(entries.begin(), entries, found->second);
  DropFirst(shelf->second);
  if (entries.empty()) shelves_.erase(shelf);
  Report();
  return true;
}

size_t StoredResponses::num_entries() const {
  std::lock_guard lock(mutex_);
  return entries_;
}

size_t StoredResponses::num_bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace spl::router
