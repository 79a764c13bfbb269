// The last half hour of a router as samples of equal length, for the operators' page. Lives in memory and is lost with
// the process: monitoring for longer times scrapes /metrics.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "services/base/clock.h"

namespace spl::router {

// Counters and state at one moment. Counters only grow.
struct HistoryReading {
  double output_tokens = 0;
  double requests = 0, errors = 0;  // that ended; those without success that no client had cancelled
  // Prompt tokens by where their KV came from; disjoint.
  double local_tokens = 0, store_tokens = 0, segment_tokens = 0, recomputed_tokens = 0, computed_tokens = 0;
  // Observations in each bucket, in the order of the bounds, then those above all bounds. Empty: none so far.
  std::vector<uint64_t> ttft, inter_token;
  // State.
  uint32_t running = 0, waiting = 0;  // requests
  uint64_t prefill_queued_tokens = 0;
  uint64_t prefill_used_pages = 0, prefill_total_pages = 0;
  uint64_t decode_used_pages = 0, decode_total_pages = 0;
};

// One period. Rates and percentiles cover what happened in it, the rest is the state at its end. NaN: nothing was
// observed, or there is no worker.
struct HistorySample {
  static constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

  SteadyTime end;
  double output_tokens_per_s = 0, requests_per_s = 0, errors_per_s = 0;
  double local_tokens_per_s = 0, store_tokens_per_s = 0, segment_tokens_per_s = 0, recomputed_tokens_per_s = 0,
         computed_tokens_per_s = 0;
  double ttft_p50_s = kNothing, ttft_p95_s = kNothing, ttft_p99_s = kNothing;
  double itl_p50_s = kNothing, itl_p95_s = kNothing, itl_p99_s = kNothing;
  double running = 0, waiting = 0, prefill_queued_tokens = 0;
  double prefill_kv_share = kNothing, decode_kv_share = kNothing;  // used pages of all, 0 to 1
};

// A member of HistorySample and its name in JSON.
struct HistoryColumn {
  std::string_view name;
  double HistorySample::*value;
};
std::span<const HistoryColumn> HistoryColumns();

// The quantile of observations, given how many are in each bucket: counts[i] of them in (bounds[i - 1], bounds[i]], the
// last count above all bounds. Interpolates linearly within a bucket; observations above all bounds count as the last
// bound. NaN: no observations. REQUIRES: counts has one element more than bounds; quantile in [0, 1].
double QuantileOfBuckets(std::span<const double> bounds, std::span<const uint64_t> counts, double quantile);

struct HistoryOptions {
  std::chrono::milliseconds period{5'000};
  size_t max_samples = 360;                             // half an hour
  std::vector<double> ttft_bounds, inter_token_bounds;  // bounds of the histograms, ascending
};

// Thread-safe. Memory is allocated once: 160 bytes a sample.
class History {
 public:
  // Borrows `clock`. The first period begins at the first call of Add.
  explicit History(HistoryOptions options, const Clock& clock = Clock::Real());

  // True once a period has passed since the last Add that was due, and before the first.
  bool Due() const;
  // Ends the period. Rates are over the time that has really passed, which is longer when Add comes late. Does nothing
  // unless Due.
  void Add(const HistoryReading& now);
  // Samples that ended within the last `age`, the oldest first.
  std::vector<HistorySample> Samples(std::chrono::milliseconds age) const;
  std::chrono::milliseconds period() const { return options_.period; }
  // Longest age of a sample.
  std::chrono::milliseconds span() const;

 private:
  bool DueAt(SteadyTime now) const;
  HistorySample Between(const HistoryReading& now, double seconds) const;

  const HistoryOptions options_;
  const Clock& clock_;
  mutable std::mutex mutex_;  // guards all below
  bool has_last_ = false;
  SteadyTime last_time_;
  HistoryReading last_;
  std::vector<HistorySample> ring_;  // next_ is the oldest once it is full
  size_t next_ = 0;
};

}  // namespace spl::router
