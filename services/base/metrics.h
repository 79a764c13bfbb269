// Handles for Prometheus metrics, the names that several programs share, and their bucket sets.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace spl {

using MetricLabels = std::map<std::string, std::string>;

// One object per program; the four programs of the all-in-one process have one each. Look handles up once, at
// construction. A handle lives as long as its Metrics; any thread may use it, for some tens of ns. The same name and
// labels give the same handle. Names start with splice_ and use base units; only counters end in _total.
class Metrics {
 public:
  Metrics();
  explicit Metrics(MetricLabels constant_labels);  // on every series, for example {"worker_id", …}

  prometheus::Counter& Counter(const std::string& name, const std::string& help, const MetricLabels& labels = {});
  prometheus::Gauge& Gauge(const std::string& name, const std::string& help, const MetricLabels& labels = {});
  prometheus::Histogram& Histogram(const std::string& name, const std::string& help, const std::vector<double>& buckets,
                                   const MetricLabels& labels = {});

  // Returns all series in the text exposition format, version 0.0.4.
  std::string Render() const;
  prometheus::Registry& registry() { return *registry_; }

 private:
  const MetricLabels constant_labels_;
  const std::shared_ptr<prometheus::Registry> registry_;
};

// Raises a counter to a value that was counted elsewhere; one that is not behind stays as it is.
void RaiseTo(prometheus::Counter& counter, uint64_t value);

// Bucket bounds, in seconds unless the name says otherwise.
namespace buckets {
const std::vector<double>& TimeToFirstToken();  // 0.001 … 2560; dense below 0.1, where reused prompts are
const std::vector<double>& InterToken();        // 0.0005 … 80
const std::vector<double>& RequestLatency();    // 0.01 … 2560
const std::vector<double>& Stage();             // 0.0001 … 640: stages, transfers, storage calls
const std::vector<double>& Decision();          // 1e-6 … 1: router decisions
const std::vector<double>& Tokens();            // 1 … 131072 tokens, powers of two
}  // namespace buckets

// Names that dashboards expect from every program that counts these things.
namespace metric {
inline constexpr char kNumRequestsRunning[] = "splice_num_requests_running";
inline constexpr char kNumRequestsWaiting[] = "splice_num_requests_waiting";
inline constexpr char kKvCacheUsagePerc[] = "splice_kv_cache_usage_perc";  // 0 to 1
inline constexpr char kTimeToFirstTokenSeconds[] = "splice_time_to_first_token_seconds";
// label stage: queue, lookup, fetch, recompute, prefill, transfer, first_decode
inline constexpr char kTtftStageSeconds[] = "splice_ttft_stage_seconds";
inline constexpr char kInterTokenLatencySeconds[] = "splice_inter_token_latency_seconds";
inline constexpr char kE2eRequestLatencySeconds[] = "splice_e2e_request_latency_seconds";
inline constexpr char kPromptTokensTotal[] = "splice_prompt_tokens_total";
inline constexpr char kGenerationTokensTotal[] = "splice_generation_tokens_total";
inline constexpr char kReuseTokensTotal[] =
    "splice_reuse_tokens_total";  // label kind: prefix, segment, recomputed, miss
inline constexpr char kKvTransferSeconds[] = "splice_kv_transfer_seconds";
inline constexpr char kKvTransferBytesTotal[] = "splice_kv_transfer_bytes_total";  // label direction: out, in
inline constexpr char kKvTransferDenseEquivalentBytesTotal[] = "splice_kv_transfer_dense_equivalent_bytes_total";
inline constexpr char kKvTransferFailuresTotal[] = "splice_kv_transfer_failures_total";  // label reason
inline constexpr char kKvLeasesOutstanding[] = "splice_kv_leases_outstanding";
inline constexpr char kKvLeasesExpiredTotal[] = "splice_kv_leases_expired_total";
inline constexpr char kRouterDecisionSeconds[] = "splice_router_decision_seconds";
inline constexpr char kRouterQueueDepth[] = "splice_router_queue_depth";
inline constexpr char kRequestSuccessTotal[] = "splice_request_success_total";  // label finished_reason
inline constexpr char kNumPreemptionsTotal[] = "splice_num_preemptions_total";
inline constexpr char kModelMigrationTotal[] = "splice_model_migration_total";
inline constexpr char kModelCancellationTotal[] = "splice_model_cancellation_total";
inline constexpr char kAdmissionRejectionTotal[] = "splice_admission_rejection_total";
}  // namespace metric

}  // namespace spl
