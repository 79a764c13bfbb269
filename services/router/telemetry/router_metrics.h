// The router's own metrics, looked up once.
#pragma once

#include <array>

#include "services/base/metrics.h"
#include "services/router/request/request.h"
#include "services/router/telemetry/ttft_stages.h"

namespace spl::router {

// Handles are safe from any thread.
struct RouterMetrics {
  explicit RouterMetrics(Metrics& metrics);

  prometheus::Histogram& ttft_seconds;
  prometheus::Histogram& inter_token_seconds;
  prometheus::Histogram& e2e_seconds;
  prometheus::Histogram& decision_seconds;
  prometheus::Histogram& queue_stage_seconds;
  prometheus::Histogram& prompt_tokens_per_request;
  prometheus::Counter& prompt_tokens;
  prometheus::Counter& generation_tokens;
  prometheus::Counter& reuse_prefix_tokens;
  prometheus::Counter& reuse_segment_tokens;
  prometheus::Counter& reuse_miss_tokens;
  prometheus::Counter& finished_stop;
  prometheus::Counter& finished_length;
  prometheus::Counter& cancellations;
  prometheus::Counter& migrations;
  prometheus::Counter& prefill_retries;
  prometheus::Counter& prefills_pool;
  prometheus::Counter& prefills_local;
  prometheus::Counter& poisoned;
  prometheus::Counter& budget_refusals;
  prometheus::Counter& rate_limited;
  Metrics& all;
  std::array<prometheus::Histogram*, kNumTtftStages> ttft_stages;  // in the order of TtftStage

  // Call for a request that has its first token; includes stages that took no time.
  void ObserveStages(const TtftStages& stages);

  // splice_router_prefills_total
  void CountPrefill(bool local) { (local ? prefills_local : prefills_pool).Increment(); }
  // splice_rate_limited_total
  void CountLimited() { rate_limited.Increment(); }
  // splice_request_errors_total{code}
  void CountError(absl::StatusCode code);
};

}  // namespace spl::router
