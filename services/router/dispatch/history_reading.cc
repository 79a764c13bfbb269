#include "services/router/dispatch/history_reading.h"

#include <algorithm>

namespace spl::router {
namespace {

// Prometheus counts in each bucket everything up to its bound.
std::vector<uint64_t> Counts(const prometheus::Histogram& histogram) {
  std::vector<uint64_t> counts;
  uint64_t below = 0;
  for (const auto& bucket : histogram.Collect().histogram.bucket) {
    counts.push_back(bucket.cumulative_count - std::min(below, bucket.cumulative_count));
    below = bucket.cumulative_count;
  }
  return counts;
}

// Workers report both numbers at once; a page that is freed meanwhile must not make a huge number.
uint64_t Used(uint64_t total, uint64_t free) { return total - std::min(total, free); }

}  // namespace

HistoryOptions HistoryOptionsFor(std::chrono::milliseconds period) {
  return {.period = period, .ttft_bounds = buckets::TimeToFirstToken(), .inter_token_bounds = buckets::InterToken()};
}

HistoryReading ReadHistory(Dispatcher& core) {
  RouterMetrics& metrics = core.metrics();
  const RequestTotals totals = core.requests().Totals();
  const auto tokens = [](uint64_t all, uint64_t part = 0) { return static_cast<double>(Used(all, part)); };
  HistoryReading now{
      .output_tokens = metrics.generation_tokens.Value(),
      .requests = static_cast<double>(totals.ended),
      .errors = static_cast<double>(totals.failed),
      .local_tokens = tokens(totals.prefix_tokens, totals.stored_tokens),
      .store_tokens = tokens(totals.stored_tokens),
      .segment_tokens = tokens(totals.aligned_tokens, totals.recomputed_tokens),
      .recomputed_tokens = tokens(totals.recomputed_tokens),
      .computed_tokens = tokens(totals.prompt_tokens, totals.prefix_tokens + totals.aligned_tokens),
      .ttft = Counts(metrics.ttft_seconds),
      .inter_token = Counts(metrics.inter_token_seconds),
      .running = static_cast<uint32_t>(core.admission().num_running()),
      .waiting = static_cast<uint32_t>(core.admission().num_waiting()),
  };
  const auto fleet = core.fleet().snapshot();
  for (const PrefillView& p : fleet->prefill) {
    now.prefill_queued_tokens += p.queued_tokens;
    now.prefill_used_pages += Used(p.total_pages, p.free_pages);
    now.prefill_total_pages += p.total_pages;
  }
  for (const DecodeView& d : fleet->decode) {
    now.decode_used_pages += Used(d.total_pages, d.free_pages);
    now.decode_total_pages += d.total_pages;
  }
  return now;
}

}  // namespace spl::router
