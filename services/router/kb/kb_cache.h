// Current versions of the knowledge bases that requests name, kept in memory.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "absl/status/statusor.h"
#include "services/base/periodic.h"
#include "services/chunk/remote/circuit_breaker.h"
#include "services/router/kb/kb_store.h"

namespace spl::router {

// One version as requests read it. Immutable: a holder keeps it even after the version is gone.
struct KbCurrent {
  uint64_t version = 0;
  std::shared_ptr<const KbContent> content;
  std::unordered_map<std::string_view, const KbDocument*> by_id;  // points into content
};

struct KbCacheOptions {
  std::chrono::milliseconds poll_interval{500};
  // A knowledge base that no request has named for this long is no longer polled; its next request waits for the store.
  std::chrono::milliseconds idle_after{60'000};
  size_t max_entries = 4096;  // knowledge bases with a current version
  // Names without one. They have a limit of their own: requests for names that do not exist evict nothing else.
  size_t max_unknown = 256;
  uint64_t max_text_bytes = 256 << 20;  // limit of document text; the least recently used are evicted
  // After one missing answer the store is not asked for this long; then the polling thread tries again.
  chunk::CircuitBreakerOptions breaker{.timeouts_to_open = 1,
                                       .min_backoff = std::chrono::milliseconds(1'000),
                                       .max_backoff = std::chrono::milliseconds(5'000)};
};

// A thread asks the store every poll_interval for newer heads of the knowledge bases in use, so that requests find
// their version without waiting. Only the first request for a knowledge base (or the first after a while) reads the
// store itself. While the store does not answer, known versions are still served, and requests for unknown ones are
// refused at once. Any thread may call.
class KbCache {
 public:
  KbCache(const KbStore& store, const KbCacheOptions& options);
  ~KbCache() { Stop(); }

  using Found = absl::StatusOr<std::shared_ptr<const KbCurrent>>;
  // NotFound: no such knowledge base. FailedPrecondition: no version is current. Unavailable: the store does not
  // answer.
  Found Current(const chunk::Digest& owner, const std::string& name);
  // The result of Current if it needs no call to the store; nothing otherwise.
  std::optional<Found> Known(const chunk::Digest& owner, const std::string& name);
  // Call after a change by this process: every later Current sees it, or something newer.
  void Refresh(const chunk::Digest& owner, const std::string& name);
  void Stop() { poller_->Stop(); }

 private:
  using Time = std::chrono::steady_clock::time_point;
  using Key = std::pair<chunk::Digest, std::string>;
  struct Entry {
    std::mutex loading;  // held while the store is asked, so that only one thread asks
    // Guarded by mutex_:
    std::shared_ptr<const KbCurrent> current;
    absl::Status status;    // why there is none
    uint64_t revision = 0;  // revision of the head
    std::string uid;        // uid of the version
    uint64_t text_bytes = 0;
    bool is_loading = false;
    Time looked_at = Time::min();  // time of the store's last answer, or of the last attempt; before all time: never
    Time used_at = Time::min();
  };

  std::shared_ptr<Entry> Find(const Key& key);
  std::optional<Found> KnownLocked(Entry& entry, Time now);
  // Asks the store, unless another thread has since `not_before`, or it is known not to answer. `probe`: asks even
  // then.
  void Load(const Key& key, Entry& entry, Time not_before, bool probe = false);
  absl::Status LoadCurrent(const Key& key, Entry& entry);
  absl::Status NoteAnswer(const absl::Status& status);
  void Poll();
  void Probe();
  void EvictLocked(const Key& keep);

  const KbStore& store_;
  const KbCacheOptions options_;
  chunk::CircuitBreaker breaker_;
  const absl::Status lost_;  // status while the store does not answer
  std::mutex mutex_;         // guards entries_ and the fields named above; never held during calls
  std::map<Key, std::shared_ptr<Entry>> entries_;
  std::unique_ptr<Periodic> poller_;  // last member: starts when the others exist
};

}  // namespace spl::router
