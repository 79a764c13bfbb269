// Requests as operators see them: running ones and the last ones that ended. Holds no text and no tokens.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace spl::router {

// How a request was served, as its receipt says.
struct RequestRan {
  std::string reuse, decode;    // the policy and the selector that ran
  bool exact = false;           // full causal attention over exact keys everywhere
  std::string prefill_place;    // "pool", or "local": the decode worker computed the prompt
  std::string transport;        // carries the prompt's KV
  double transfer_seconds = 0;  // push of KV behind the last computed layer
  // Prompt tokens. prefix includes stored, aligned includes recomputed.
  uint32_t prefix_tokens = 0, stored_tokens = 0, aligned_tokens = 0, recomputed_tokens = 0, computed_tokens = 0;
  uint64_t bytes_fetched = 0, bytes_moved = 0;  // store to prefill worker, prefill worker to decode worker
};

struct RequestRecord {
  std::string request_id, caller, api;
  std::string trace_id;       // 32 hex digits
  bool traced = false;        // its spans are recorded
  std::string reuse, decode;  // as requested
  std::string stage;          // "tokenizing", "queued", "prefill", "decoding", "done"
  std::string status;         // for a request that ended: "OK", or code and message
  std::string prefill_worker, decode_worker;
  int64_t started_unix_ms = 0;
  double seconds = 0;  // since then, or in total
  double queue_seconds = 0, ttft_seconds = 0;
  std::map<std::string, double> ttft_stages;  // set once the first token is there
  uint32_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;
  uint32_t attempts = 0, migrations = 0;
  std::optional<RequestRan> ran;  // set once the first token is there
};

// Sums over the requests that have ended.
struct RequestTotals {
  uint64_t ended = 0;
  uint64_t failed = 0;  // those without success whose client had not cancelled them
  // Prompt tokens of the successful ones. prefix includes stored, aligned includes recomputed.
  uint64_t prompt_tokens = 0, prefix_tokens = 0, stored_tokens = 0, aligned_tokens = 0, recomputed_tokens = 0;
};

// Thread-safe.
class RequestLog {
 public:
  explicit RequestLog(size_t max_recent = 256) : max_recent_(max_recent) {}

  void Begin(uint64_t id, RequestRecord record);
  // Runs `change` on the record of a running request; it must not block. Does nothing for a request that has ended.
  void Update(uint64_t id, const std::function<void(RequestRecord&)>& change);
  void End(uint64_t id, const std::function<void(RequestRecord&)>& change);

  std::vector<RequestRecord> Active() const;  // the oldest first
  std::vector<RequestRecord> Recent() const;  // the latest first
  // The latest request with this id (clients may use one twice); one under way before those that ended.
  std::optional<RequestRecord> Find(const std::string& request_id) const;
  RequestTotals Totals() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    RequestRecord record;
    Clock::time_point since;
  };

  const size_t max_recent_;
  mutable std::mutex mutex_;  // guards the three below
  std::map<uint64_t, Entry> active_;
  std::deque<RequestRecord> recent_;
  RequestTotals totals_;
};

}  // namespace spl::router
