// What one API key may do: requests and tokens per minute, requests at once.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/request/request.h"

namespace spl::router {

// Buckets that fill evenly over a minute and hold a minute's worth. A request takes one from the requests and is let in
// while there are tokens; its prompt and its output are taken when they are known, so that a bucket can be in debt: the
// key then waits for it to fill up. Nothing is estimated. Thread-safe.
//
// Keys are counted by name: keys of one name in the key file share what they may do. Memory: one entry for each name
// that has limits.
class RateLimits : public std::enable_shared_from_this<RateLimits> {
 public:
  using Clock = std::chrono::steady_clock;

  // A request that was let in; counts as one at once while it lives. Movable.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept { *this = std::move(other); }
    Lease& operator=(Lease&& other) noexcept;
    ~Lease() { Reset(); }
    void Reset();
    void Take(uint64_t tokens);

   private:
    friend class RateLimits;
    std::shared_ptr<RateLimits> limits_;
    std::string name_;
  };

  // ResourceExhausted names the limit, with code rate_limit_exceeded and the time until it lets one more in.
  absl::StatusOr<Lease> Admit(const Caller& caller, Clock::time_point now);

  // x-ratelimit-{limit,remaining,reset}-{requests,tokens} as OpenAI's API has them; of the limits that the caller has.
  using Headers = std::vector<std::pair<std::string, std::string>>;
  Headers HeadersFor(const Caller& caller, Clock::time_point now);

 private:
  struct Bucket {
    double level = 0;
    Clock::time_point at{};
    double per_minute = 0;  // 0: no limit
  };
  struct Entry {
    Bucket requests, tokens;
    uint32_t running = 0;
  };

  Entry& EntryLocked(const Caller& caller, Clock::time_point now);

  std::mutex mutex_;  // guards entries_
  std::map<std::string, Entry> entries_;
};

}  // namespace spl::router
