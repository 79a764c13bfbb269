#include "services/router/http/client_waits.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace spl::router {

ClientWaits::Client::Client(std::shared_ptr<ClientWaits> table, Evict evict) : table_(std::move(table)) {
  std::lock_guard lock(table_->mutex_);
  entry_ = table_->entries_.insert(table_->entries_.end(), Entry{.evict = std::move(evict)});
}

ClientWaits::Client::~Client() {
  std::lock_guard lock(table_->mutex_);
  table_->DropLocked(*entry_, entry_->bytes);
  table_->entries_.erase(entry_);
}

void ClientWaits::Client::WaitFor(Wait wait) {
  std::lock_guard lock(table_->mutex_);
  entry_->wait = wait;
  if (wait == Wait::kNone) return;
  entry_->since = Clock::now();
  table_->entries_.splice(table_->entries_.end(), table_->entries_, entry_);
}

bool ClientWaits::Client::Hold(size_t bytes) {
  std::vector<Evict> evicted;
  bool fits = false;
  {
    std::lock_guard lock(table_->mutex_);
    const auto now = Clock::now();
    const auto has_room = [&] { return table_->held_bytes_ + bytes <= table_->max_bytes_; };
    for (auto it = table_->entries_.begin(); it != table_->entries_.end() && !has_room(); ++it) {
      const bool waits = it->wait == Wait::kRequest || it->wait == Wait::kAnswer;
      if (it == entry_ || !waits || it->bytes == 0) continue;
      if (now - it->since < table_->min_age_) break;
      // Its memory goes when its connection hears of it, a moment later.
      table_->DropLocked(*it, it->bytes);
      it->wait = Wait::kNone;
      evicted.push_back(it->evict);
    }
    fits = has_room();
    if (fits) table_->HoldLocked(*entry_, bytes);
  }
  for (const Evict& evict : evicted) evict(Need::kBytes);
  return fits;
}

void ClientWaits::Client::HoldAnyway(size_t bytes) {
  std::lock_guard lock(table_->mutex_);
  table_->HoldLocked(*entry_, bytes);
}

void ClientWaits::Client::Drop(size_t bytes) {
  std::lock_guard lock(table_->mutex_);
  table_->DropLocked(*entry_, bytes);
}

void ClientWaits::Client::DropAll() {
  std::lock_guard lock(table_->mutex_);
  table_->DropLocked(*entry_, entry_->bytes);
}

bool ClientWaits::EvictConnection() {
  Evict evict;
  {
    std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    const auto oldest = [&](Wait wait) {
      const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.wait == wait; });
      return found != entries_.end() && now - found->since >= min_age_ ? found : entries_.end();
    };
    auto found = oldest(Wait::kIdle);
    if (found == entries_.end()) found = oldest(Wait::kRequest);
    if (found == entries_.end()) return false;
    found->wait = Wait::kNone;
    evict = found->evict;
  }
  evict(Need::kConnection);
  return true;
}

size_t ClientWaits::held_bytes() const {
  std::lock_guard lock(mutex_);
  return held_bytes_;
}

size_t ClientWaits::TakePeakBytes() {
  std::lock_guard lock(mutex_);
  return std::exchange(peak_bytes_, held_bytes_);
}

void ClientWaits::HoldLocked(Entry& entry, size_t bytes) {
  entry.bytes += bytes;
  held_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, held_bytes_);
}

// An evicted connection holds nothing any more, so less may be left than its owner knows.
void ClientWaits::DropLocked(Entry& entry, size_t bytes) {
  const size_t dropped = std::min(bytes, entry.bytes);
  entry.bytes -= dropped;
  held_bytes_ -= dropped;
}

}  // namespace spl::router
