#include "services/router/telemetry/history.h"

#include <algorithm>
#include <numeric>

namespace spl::router {
namespace {

constexpr HistoryColumn kColumns[] = {{"output_tokens_per_second", &HistorySample::output_tokens_per_s},
                                      {"requests_per_second", &HistorySample::requests_per_s},
                                      {"errors_per_second", &HistorySample::errors_per_s},
                                      {"prompt_local_tokens_per_second", &HistorySample::local_tokens_per_s},
                                      {"prompt_store_tokens_per_second", &HistorySample::store_tokens_per_s},
                                      {"prompt_segment_tokens_per_second", &HistorySample::segment_tokens_per_s},
                                      {"prompt_recomputed_tokens_per_second", &HistorySample::recomputed_tokens_per_s},
                                      {"prompt_computed_tokens_per_second", &HistorySample::computed_tokens_per_s},
                                      {"ttft_p50_seconds", &HistorySample::ttft_p50_s},
                                      {"ttft_p95_seconds", &HistorySample::ttft_p95_s},
                                      {"ttft_p99_seconds", &HistorySample::ttft_p99_s},
                                      {"itl_p50_seconds", &HistorySample::itl_p50_s},
                                      {"itl_p95_seconds", &HistorySample::itl_p95_s},
                                      {"itl_p99_seconds", &HistorySample::itl_p99_s},
                                      {"requests_running", &HistorySample::running},
                                      {"requests_waiting", &HistorySample::waiting},
                                      {"prefill_queued_tokens", &HistorySample::prefill_queued_tokens},
                                      {"prefill_kv_share", &HistorySample::prefill_kv_share},
                                      {"decode_kv_share", &HistorySample::decode_kv_share}};

// A counter that went back was read from a worker that began anew: its growth is unknown, and 0 is shown.
double Rate(double now, double last, double seconds) { return std::max(0.0, now - last) / seconds; }

double Share(uint64_t used, uint64_t total) {
  return total == 0 ? HistorySample::kNothing : static_cast<double>(used) / static_cast<double>(total);
}

// Observations since `last`.
std::vector<uint64_t> Fresh(std::vector<uint64_t> now, const std::vector<uint64_t>& last) {
  for (size_t i = 0; i < std::min(now.size(), last.size()); ++i) now[i] -= std::min(now[i], last[i]);
  return now;
}

}  // namespace

std::span<const HistoryColumn> HistoryColumns() { return kColumns; }

double QuantileOfBuckets(std::span<const double> bounds, std::span<const uint64_t> counts, double quantile) {
  const auto total = static_cast<double>(std::accumulate(counts.begin(), counts.end(), uint64_t{0}));
  if (total == 0) return HistorySample::kNothing;
  const double rank = quantile * total;
  double below = 0;
  for (size_t i = 0; i < bounds.size(); ++i) {
    const auto here = static_cast<double>(counts[i]);
    if (here > 0 && below + here >= rank) {
      const double low = i == 0 ? 0 : bounds[i - 1];
      return low + (bounds[i] - low) * (rank - below) / here;
    }
    below += here;
  }
  return bounds.empty() ? 0 : bounds.back();
}

History::History(HistoryOptions options, const Clock& clock) : options_(std::move(options)), clock_(clock) {
  ring_.reserve(options_.max_samples);
}

bool History::DueAt(SteadyTime now) const { return !has_last_ || now - last_time_ >= options_.period; }

bool History::Due() const {
  std::lock_guard lock(mutex_);
  return DueAt(clock_.Now());
}

HistorySample History::Between(const HistoryReading& now, double seconds) const {
  const auto rate = [&](double HistoryReading::*counter) { return Rate(now.*counter, last_.*counter, seconds); };
  HistorySample sample{.output_tokens_per_s = rate(&HistoryReading::output_tokens),
                       .requests_per_s = rate(&HistoryReading::requests),
                       .errors_per_s = rate(&HistoryReading::errors),
                       .local_tokens_per_s = rate(&HistoryReading::local_tokens),
                       .store_tokens_per_s = rate(&HistoryReading::store_tokens),
                       .segment_tokens_per_s = rate(&HistoryReading::segment_tokens),
                       .recomputed_tokens_per_s = rate(&HistoryReading::recomputed_tokens),
                       .computed_tokens_per_s = rate(&HistoryReading::computed_tokens),
                       .running = static_cast<double>(now.running),
                       .waiting = static_cast<double>(now.waiting),
                       .prefill_queued_tokens = static_cast<double>(now.prefill_queued_tokens),
                       .prefill_kv_share = Share(now.prefill_used_pages, now.prefill_total_pages),
                       .decode_kv_share = Share(now.decode_used_pages, now.decode_total_pages)};
  const std::vector<uint64_t> ttft = Fresh(now.ttft, last_.ttft), itl = Fresh(now.inter_token, last_.inter_token);
  sample.ttft_p50_s = QuantileOfBuckets(options_.ttft_bounds, ttft, 0.5);
  sample.ttft_p95_s = QuantileOfBuckets(options_.ttft_bounds, ttft, 0.95);
  sample.ttft_p99_s = QuantileOfBuckets(options_.ttft_bounds, ttft, 0.99);
  sample.itl_p50_s = QuantileOfBuckets(options_.inter_token_bounds, itl, 0.5);
  sample.itl_p95_s = QuantileOfBuckets(options_.inter_token_bounds, itl, 0.95);
  sample.itl_p99_s = QuantileOfBuckets(options_.inter_token_bounds, itl, 0.99);
  return sample;
}

void History::Add(const HistoryReading& now) {
  std::lock_guard lock(mutex_);
  const SteadyTime time = clock_.Now();
  if (!DueAt(time)) return;
  if (has_last_) {
    HistorySample sample = Between(now, std::chrono::duration<double>(time - last_time_).count());
    sample.end = time;
    if (ring_.size() < options_.max_samples) {
      ring_.push_back(sample);
    } else if (!ring_.empty()) {
      ring_[next_] = sample;
      next_ = (next_ + 1) % ring_.size();
    }
  }
  has_last_ = true;
  last_time_ = time;
  last_ = now;
}

std::vector<HistorySample> History::Samples(std::chrono::milliseconds age) const {
  std::lock_guard lock(mutex_);
  const SteadyTime now = clock_.Now();
  std::vector<HistorySample> out;
  out.reserve(ring_.size());
  for (size_t i = 0; i < ring_.size(); ++i) {
    const HistorySample& sample = ring_[(next_ + i) % ring_.size()];
    if (now - sample.end <= age) out.push_back(sample);
  }
  return out;
}

std::chrono::milliseconds History::span() const { return options_.period * static_cast<int64_t>(options_.max_samples); }

}  // namespace spl::router
