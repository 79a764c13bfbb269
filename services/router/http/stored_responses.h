// Responses that a later request may go on with.
#pragma once

#include <chrono>
#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "services/base/metrics.h"
#include "services/chunk/chunk.h"

namespace spl::router {

struct StoredResponsesOptions {
  size_t max_bytes = 256 << 20;    // over all callers; 0 keeps nothing
  size_t max_entries = 65'536;     // likewise
  std::chrono::seconds ttl{3600};  // since the last use
};

struct StoredResponse {
  std::string response;  // the response object, JSON
  std::string items;     // the conversation up to and with the response, a JSON list
  std::string session;   // the conversation's name at the workers

  size_t bytes() const { return sizeof(StoredResponse) + response.size() + items.size() + session.size(); }
};

// A table in memory, bounded in bytes, entries and time. Callers see their own responses only. Beyond a bound the least
// recently used response of the caller who keeps the most bytes is dropped, so that no caller loses one to a caller who
// has more. Expired responses go with the next call. Thread-safe; never blocks for long.
class StoredResponses {
 public:
  using Clock = std::chrono::steady_clock;
  using Owner = chunk::Digest;

  // Counts in `metrics`, which must outlive it: splice_router_stored_responses, splice_router_stored_response_bytes,
  // and in splice_router_stored_responses_missed_total each Find without an answer.
  StoredResponses(StoredResponsesOptions options, Metrics& metrics);

  bool enabled() const { return options_.max_bytes > 0; }
  std::chrono::seconds ttl() const { return options_.ttl; }
  // Keeps a response under its id, which must be unguessable.
  void Add(const Owner& owner, const std::string& id, StoredResponse response, Clock::time_point now);
  // Null: there is none of this owner. Counts as a use.
  std::shared_ptr<const StoredResponse> Find(const Owner& owner, const std::string& id, Clock::time_point now);
  // False: there is none of this owner.
  bool Erase(const Owner& owner, const std::string& id, Clock::time_point now);

  size_t num_entries() const;
  size_t num_bytes() const;

 private:
  struct Entry {
    std::string id;
    std::shared_ptr<const StoredResponse> response;
    Clock::time_point used;
    size_t bytes() const;
  };
  struct Shelf {
    std::list<Entry> entries;  // the least recently used one first
    std::unordered_map<std::string, std::list<Entry>::iterator> by_id;
    size_t bytes = 0;
  };
  void DropFirst(Shelf& shelf);
  void DropExpired(Clock::time_point now);
  void MakeRoom();
  std::shared_ptr<const StoredResponse> FindLocked(const Owner& owner, const std::string& id, Clock::time_point now);
  void Report();

  const StoredResponsesOptions options_;
  prometheus::Gauge& entries_metric_;
  prometheus::Gauge& bytes_metric_;
  prometheus::Counter& missed_metric_;
  mutable std::mutex mutex_;  // guards the three below
  std::map<Owner, Shelf> shelves_;
  size_t bytes_ = 0;
  size_t entries_ = 0;
};

}  // namespace spl::router
