// Limits of one API key: requests and tokens per minute, and concurrent requests.
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

// Token buckets that fill evenly and hold a minute's worth. A request takes one from the request bucket, and is
// admitted while the token bucket is positive. Its prompt and output tokens are taken when they are known, so a bucket
// can be in debt; the key's requests are then refused until it has filled up. Nothing is estimated. Thread-safe.
//
// Counted by the name of a key: keys with the same name in the key file share limits. Memory: one entry per name that
// has limits.
class RateLimits : public std::enable_shared_from_this<RateLimits> {
 public:
  using Clock = std::chrono::steady_clock;

  // An admitted request; counts as concurrent while it lives. Movable.
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

  // ResourceExhausted names the limit, with code rate_limit_exceeded and the time until it admits one more.
  absl::StatusOr<Lease> Admit(const Caller& caller, Clock::time_point now);

  // Headers x-ratelimit-{limit,remaining,reset}-{requests,tokens} as in OpenAI's API, for the limits that the caller
  // has.
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
