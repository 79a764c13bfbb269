#include "services/router/admission/rate_limits.h"

#include <algorithm>
#include <cmath>

#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

constexpr double kMinute = 60;

// "1s", "6m0s", "120ms", as OpenAI writes how long a limit takes to be whole again.
std::string DurationText(double seconds) {
  if (seconds < 1) return fmt::format("{}ms", static_cast<int64_t>(std::ceil(seconds * 1e3)));
  const auto whole = static_cast<int64_t>(std::ceil(seconds));
  return whole < 60 ? fmt::format("{}s", whole) : fmt::format("{}m{}s", whole / 60, whole % 60);
}

absl::Status Refused(const Caller& caller, const std::string& limit, double wait_s) {
  const auto retry_s = static_cast<uint32_t>(std::clamp(std::ceil(wait_s), 1.0, 3600.0));
  return SetErrorCode(
      SetRetryAfterMs(Errorf(absl::StatusCode::kResourceExhausted,
                             "the limit of key \"{}\" is reached: {}; try again in {} s", caller.name, limit, retry_s),
                      retry_s * 1000),
      "rate_limit_exceeded");
}

}  // namespace

// Brings the entry's buckets to now, and to the limits that the caller has now: they may have been changed.
RateLimits::Entry& RateLimits::EntryLocked(const Caller& caller, Clock::time_point now) {
  Entry& entry = entries_[caller.name];
  const auto refresh = [&](Bucket& bucket, double per_minute) {
    const double passed = std::chrono::duration<double>(now - bucket.at).count();
    const bool changed = bucket.per_minute == 0;
    bucket.level =
        changed ? per_minute : std::min(per_minute, bucket.level + std::max(0.0, passed) * per_minute / kMinute);
    bucket.per_minute = per_minute;
    bucket.at = now;
  };
  refresh(entry.requests, caller.limits.requests_per_minute);
  refresh(entry.tokens, caller.limits.tokens_per_minute);
  return entry;
}

absl::StatusOr<RateLimits::Lease> RateLimits::Admit(const Caller& caller, Clock::time_point now) {
  const CallerLimits& limits = caller.limits;
  Lease lease;
  if (!limits.any()) return lease;
  std::lock_guard lock(mutex_);
  Entry& entry = EntryLocked(caller, now);
  if (limits.max_concurrent > 0 && entry.running >= limits.max_concurrent) {
    return Refused(caller, fmt::format("{} concurrent requests", limits.max_concurrent), 1);
  }
  if (limits.tokens_per_minute > 0 && entry.tokens.level <= 0) {
    return Refused(caller, fmt::format("{} tokens per minute", limits.tokens_per_minute),
                   (1 - entry.tokens.level) * kMinute / limits.tokens_per_minute);
  }
  if (limits.requests_per_minute > 0) {
    if (entry.requests.level < 1) {
      return Refused(caller, fmt::format("{} requests per minute", limits.requests_per_minute),
                     (1 - entry.requests.level) * kMinute / limits.requests_per_minute);
    }
    entry.requests.level -= 1;
  }
  ++entry.running;
  lease.limits_ = shared_from_this();
  lease.name_ = caller.name;
  return lease;
}

RateLimits::Headers RateLimits::HeadersFor(const Caller& caller, Clock::time_point now) {
  Headers headers;
  if (!caller.limits.any()) return headers;
  std::lock_guard lock(mutex_);
  const Entry& entry = EntryLocked(caller, now);
  const auto add = [&](const std::string& what, const Bucket& bucket) {
    if (bucket.per_minute == 0) return;
    const double reset_s = (bucket.per_minute - bucket.level) * kMinute / bucket.per_minute;
    headers.emplace_back("x-ratelimit-limit-" + what, fmt::format("{:.0f}", bucket.per_minute));
    headers.emplace_back("x-ratelimit-remaining-" + what,
                         fmt::format("{:.0f}", std::floor(std::max(0.0, bucket.level))));
    headers.emplace_back("x-ratelimit-reset-" + what, DurationText(reset_s));
  };
  add("requests", entry.requests);
  add("tokens", entry.tokens);
  return headers;
}

RateLimits::Lease& RateLimits::Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  limits_ = std::exchange(other.limits_, nullptr);
  name_ = std::move(other.name_);
  return *this;
}

void RateLimits::Lease::Take(uint64_t tokens) {
  if (limits_ == nullptr) return;
  std::lock_guard lock(limits_->mutex_);
  limits_->entries_[name_].tokens.level -= static_cast<double>(tokens);
}

void RateLimits::Lease::Reset() {
  if (limits_ == nullptr) return;
  {
    std::lock_guard lock(limits_->mutex_);
    --limits_->entries_[name_].running;
  }
  limits_.reset();
}

}  // namespace spl::router
