// Requests as operators see them: running ones and the last ones that ended. Holds no text and no tokens.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace spl::router {

struct RequestRecord {
  std::string request_id, caller, api;
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

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    RequestRecord record;
    Clock::time_point since;
  };

  const size_t max_recent_;
  mutable std::mutex mutex_;  // guards the two below
  std::map<uint64_t, Entry> active_;
  std::deque<RequestRecord> recent_;
};

}  // namespace spl::router
