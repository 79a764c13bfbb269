#include "services/router/kb/kb_cache.h"

#include <algorithm>
#include <vector>

#include "services/base/log.h"
#include "services/chunk/remote/store_call.h"
#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

// The store's answer that no version is current. Any other error says nothing about that.
bool IsNone(const absl::Status& status) {
  return status.code() == absl::StatusCode::kNotFound || status.code() == absl::StatusCode::kFailedPrecondition;
}

}  // namespace

KbCache::KbCache(const KbStore& store, const KbCacheOptions& options)
    : store_(store),
      options_(options),
      breaker_(options.breaker, Clock::Real()),
      lost_(SetRetryAfterMs(absl::UnavailableError("the store of the knowledge bases does not answer; try again"),
                            static_cast<uint32_t>(options.breaker.min_backoff.count()))) {
  poller_ = std::make_unique<Periodic>(options.poll_interval, [this] { Poll(); });
}

std::shared_ptr<KbCache::Entry> KbCache::Find(const Key& key) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Entry>& entry = entries_[key];
  if (entry == nullptr) {
    entry = std::make_shared<Entry>();
    std::shared_ptr<Entry> mine = entry;  // EvictLocked changes the map
    EvictLocked(key);
    return mine;
  }
  return entry;
}

KbCache::Found KbCache::Current(const chunk::Digest& owner, const std::string& name) {
  const Key key(owner, name);
  const std::shared_ptr<Entry> entry = Find(key);
  const Time now = std::chrono::steady_clock::now();
  {
    std::lock_guard lock(mutex_);
    if (std::optional<Found> known = KnownLocked(*entry, now); known.has_value()) return *std::move(known);
  }
  Load(key, *entry, now);
  std::lock_guard lock(mutex_);
  if (entry->current != nullptr) return entry->current;
  return entry->status;
}

std::optional<KbCache::Found> KbCache::Known(const chunk::Digest& owner, const std::string& name) {
  const std::shared_ptr<Entry> entry = Find(Key(owner, name));
  std::lock_guard lock(mutex_);
  return KnownLocked(*entry, std::chrono::steady_clock::now());
}

std::optional<KbCache::Found> KbCache::KnownLocked(Entry& entry, Time now) {
  const bool was_in_use = entry.used_at + options_.idle_after > now;
  entry.used_at = now;
  if (entry.current != nullptr) {
    // The poller looks every interval. An entry that it has missed twice is not polled, or the poller waits for the
    // store.
    if (entry.looked_at >= now - 2 * options_.poll_interval) return entry.current;
    if (!breaker_.closed() || (entry.is_loading && was_in_use)) return entry.current;
    return std::nullopt;
  }
  if (!breaker_.closed()) return lost_;
  // Look again sooner after "there is none": it may be published at any moment. A store that failed can wait.
  const Time fresh_since = now - (IsNone(entry.status) ? options_.poll_interval / 5 : 2 * options_.poll_interval);
  if (entry.looked_at >= fresh_since) return entry.status;
  return std::nullopt;
}

void KbCache::Refresh(const chunk::Digest& owner, const std::string& name) {
  const Key key(owner, name);
  std::shared_ptr<Entry> entry;
  {
    std::lock_guard lock(mutex_);
    const auto found = entries_.find(key);
    if (found == entries_.end()) return;  // no request has asked; the first one that does reads the store
    entry = found->second;
  }
  // The store has just taken the change: it answers, whatever is remembered.
  Load(key, *entry, std::chrono::steady_clock::now(), /*probe=*/true);
}

void KbCache::Load(const Key& key, Entry& entry, Time not_before, bool probe) {
  std::lock_guard loading(entry.loading);
  {
    std::lock_guard lock(mutex_);
    if (entry.looked_at > not_before) return;
    if (!probe && !breaker_.closed()) {
      if (entry.current == nullptr) entry.status = lost_;
      return;
    }
    entry.is_loading = true;
  }
  const Time started = std::chrono::steady_clock::now();
  absl::Status status = LoadCurrent(key, entry);
  // A version that was deleted between its head and its content: the head has news.
  if (status.code() == absl::StatusCode::kNotFound) status = LoadCurrent(key, entry);
  status = NoteAnswer(status);
  std::lock_guard lock(mutex_);
  entry.is_loading = false;
  entry.looked_at = started;
  if (IsNone(status)) {
    entry.current = nullptr;
    entry.uid.clear();
    entry.text_bytes = 0;
    entry.revision = 0;
  } else if (entry.current != nullptr && !status.ok() && status != lost_ && status.code() != entry.status.code()) {
    // Callers get the version that is known, and no error.
    log::Error("router.kb_not_read", log::F("name", key.second), log::F("cause", status));
  }
  entry.status = status;
}

// The status for callers. A store that does not answer is the cluster's fault, whatever its error; its address is for
// operators only.
absl::Status KbCache::NoteAnswer(const absl::Status& status) {
  if (!chunk::IsLoss(status)) {
    if (breaker_.Succeeded()) log::Info("router.kb_store_answers");
    return status;
  }
  if (breaker_.Failed(/*timed_out=*/status.code() == absl::StatusCode::kDeadlineExceeded))
    log::Warning("router.kb_store_lost", log::F("status", status));
  return lost_;
}

absl::Status KbCache::LoadCurrent(const Key& key, Entry& entry) {
  const auto& [owner, name] = key;
  SPLICE_ASSIGN_OR_RETURN(const KbStore::Loaded loaded, store_.Load(owner, name));
  std::string known_uid;
  {
    std::lock_guard lock(mutex_);
    // An older head is a copy of a store that was away when the newer one was put.
    if (entry.current != nullptr && loaded.revision <= entry.revision) return absl::OkStatus();
    known_uid = entry.uid;
  }
  const KbVersion* const version = loaded.head.Find(loaded.head.current);
  if (version == nullptr) {
    return SetErrorCode(Errorf(absl::StatusCode::kFailedPrecondition,
                               "knowledge base \"{}\" has no current version; publish or swap to one", name),
                        "knowledge_base_not_ready");
  }
  if (version->uid == known_uid) {  // another change of the head
    std::lock_guard lock(mutex_);
    entry.revision = loaded.revision;
    return absl::OkStatus();
  }
  auto current = std::make_shared<KbCurrent>();
  current->version = version->version;
  SPLICE_ASSIGN_OR_RETURN(current->content, store_.LoadContent(owner, name, *version));
  uint64_t text_bytes = 0;
  for (const KbDocument& document : current->content->documents) {
    current->by_id[document.id] = &document;
    text_bytes += document.text.size();
  }
  std::lock_guard lock(mutex_);
  entry.current = std::move(current);
  entry.revision = loaded.revision;
  entry.uid = version->uid;
  entry.text_bytes = text_bytes;
  EvictLocked(key);
  return absl::OkStatus();
}

void KbCache::Poll() {
  if (!breaker_.closed()) return Probe();
  const Time now = std::chrono::steady_clock::now();
  std::vector<std::pair<Key, std::shared_ptr<Entry>>> in_use;
  {
    std::lock_guard lock(mutex_);
    for (const auto& named : entries_) {
      if (named.second->current != nullptr && named.second->used_at + options_.idle_after > now) {
        in_use.push_back(named);
      }
    }
  }
  for (const auto& [key, entry] : in_use) {
    if (breaker_.closed()) Load(key, *entry, now);
  }
}

// Asks for the entry that was named last: it is wanted, and any answer closes the breaker.
void KbCache::Probe() {
  if (!breaker_.TakeProbe()) return;
  std::pair<Key, std::shared_ptr<Entry>> last;
  {
    std::lock_guard lock(mutex_);
    for (const auto& named : entries_) {
      if (last.second == nullptr || named.second->used_at > last.second->used_at) last = named;
    }
  }
  if (last.second != nullptr) Load(last.first, *last.second, std::chrono::steady_clock::now(), /*probe=*/true);
}

// The least recently used go, but not the one that is being used. An entry without a version that a thread is loading
// stays, too: it may be about to get one.
void KbCache::EvictLocked(const Key& keep) {
  uint64_t text_bytes = 0;
  size_t num_unknown = 0;
  for (const auto& named : entries_) {
    text_bytes += named.second->text_bytes;
    num_unknown += named.second->current == nullptr;
  }
  size_t num_known = entries_.size() - num_unknown;
  const auto oldest = [&](bool known) {
    auto found = entries_.end();
    for (auto it = entries_.begin(); it != entries_.end(); ++it) {
      const Entry& entry = *it->second;
      if (it->first == keep || (entry.current != nullptr) != known || (!known && entry.is_loading)) continue;
      if (found == entries_.end() || entry.used_at < found->second->used_at) found = it;
    }
    return found;
  };
  for (; num_unknown > options_.max_unknown; --num_unknown) {
    const auto it = oldest(/*known=*/false);
    if (it == entries_.end()) break;
    entries_.erase(it);
  }
  for (; num_known > options_.max_entries || text_bytes > options_.max_text_bytes; --num_known) {
    const auto it = oldest(/*known=*/true);
    if (it == entries_.end()) break;
    text_bytes -= it->second->text_bytes;
    entries_.erase(it);
  }
}

}  // namespace spl::router
