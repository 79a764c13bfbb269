#include "services/engine/runtime/fetch_cost.h"

#include <algorithm>

#include "kernels/common/kv_pool.h"

namespace spl::engine {

namespace {

// A fetch that takes a smaller share of the computing time is left alone: to compute beside it would save a fifth of
// its time at most, and competes with it for the host's cores.
constexpr double kAloneShare = 0.25;

}  // namespace

std::string_view NameOf(StoreUse use) {
  switch (use) {
    case StoreUse::kNone:
      return "none";
    case StoreUse::kFetched:
      return "fetched";
    case StoreUse::kShared:
      return "shared";
    case StoreUse::kSlower:
      return "slower";
    case StoreUse::kLate:
      return "late";
  }
  return "none";
}

bool IsWorthFetching(const FetchTimes& times) {
  return !times.fetch_s.has_value() || *times.fetch_s <= times.compute_s + times.queue_s;
}

double HoldForAnswer(const FetchTimes& times, double latency_s) {
  const double most = kHeldShare * times.compute_s;
  return latency_s <= most ? most : 0;
}

double HoldForBytes(const FetchTimes& times) {
  return times.fetch_s.has_value() && *times.fetch_s <= kAloneShare * times.compute_s ? kHeldShare * times.compute_s
                                                                                      : 0;
}

bool IsOnSchedule(const FetchTimes& times, double waited_s, double saved_s) {
  return waited_s - saved_s <= kHeldShare * times.compute_s;
}

double HoldForCopies(const FetchTimes& times) {
  if (!IsWorthFetching(times)) return 0;
  const double held = kHeldShare * times.compute_s;
  const double most = times.fetch_s.has_value()
                          ? std::min(kPatience * *times.fetch_s + held, times.compute_s + times.queue_s)
                          : kUnmeasuredShare * times.compute_s;
  return (1 - times.found_share) * held + times.found_share * most;
}

int32_t RowsWhileFetching(double seconds, double rows_per_s, int32_t most) {
  if (seconds <= 0) return most;
  constexpr int32_t kPage = kernels::kPageTokens;
  const double rows = std::min(seconds * rows_per_s, static_cast<double>(most));
  return std::min(most, std::max(kPage, static_cast<int32_t>(rows) / kPage * kPage));
}

}  // namespace spl::engine
