#include "services/router/telemetry/router_metrics.h"

#include "services/base/status.h"

namespace spl::router {
namespace {

prometheus::Histogram& StageHistogram(Metrics& m, const char* stage) {
  return m.Histogram("splice_router_ttft_stage_seconds", "Consecutive shares of the time to first token.",
                     buckets::Stage(), {{"stage", stage}});
}

prometheus::Counter& PrefillsCounter(Metrics& m, const char* place) {
  return m.Counter("splice_router_prefills_total", "Prefills that were started, by where.", {{"place", place}});
}

}  // namespace

RouterMetrics::RouterMetrics(Metrics& m)
    : ttft_seconds(m.Histogram(metric::kTimeToFirstTokenSeconds, "From the request's arrival to its first token.",
                               buckets::TimeToFirstToken())),
      inter_token_seconds(
          m.Histogram(metric::kInterTokenLatencySeconds, "Between tokens of one continuation.", buckets::InterToken())),
      e2e_seconds(m.Histogram(metric::kE2eRequestLatencySeconds, "From the request's arrival to its last token.",
                              buckets::RequestLatency())),
      decision_seconds(
          m.Histogram(metric::kRouterDecisionSeconds, "Choosing the workers of a request.", buckets::Decision())),
      queue_stage_seconds(m.Histogram(metric::kTtftStageSeconds, "Shares of the time to first token.", buckets::Stage(),
                                      {{"stage", "queue"}})),
      prompt_tokens_per_request(
          m.Histogram("splice_request_prompt_tokens", "Prompt tokens of one request.", buckets::Tokens())),
      prompt_tokens(m.Counter(metric::kPromptTokensTotal, "Prompt tokens of finished requests.")),
      generation_tokens(m.Counter(metric::kGenerationTokensTotal, "Tokens sent by the workers.")),
      reuse_prefix_tokens(
          m.Counter(metric::kReuseTokensTotal, "Prompt tokens by where their KV came from.", {{"kind", "prefix"}})),
      reuse_segment_tokens(
          m.Counter(metric::kReuseTokensTotal, "Prompt tokens by where their KV came from.", {{"kind", "segment"}})),
      reuse_miss_tokens(
          m.Counter(metric::kReuseTokensTotal, "Prompt tokens by where their KV came from.", {{"kind", "miss"}})),
      finished_stop(
          m.Counter(metric::kRequestSuccessTotal, "Continuations by how they ended.", {{"finished_reason", "stop"}})),
      finished_length(
          m.Counter(metric::kRequestSuccessTotal, "Continuations by how they ended.", {{"finished_reason", "length"}})),
      cancellations(m.Counter(metric::kModelCancellationTotal, "Requests whose client left or whose deadline passed.")),
      migrations(m.Counter(metric::kModelMigrationTotal, "Requests moved to another decode worker midway.")),
      prefill_retries(m.Counter("splice_router_retries_total", "Attempts beyond a request's first.")),
      prefills_pool(PrefillsCounter(m, "pool")),
      prefills_local(PrefillsCounter(m, "local")),
      poisoned(m.Counter("splice_router_poisoned_requests_total",
                         "Requests refused because workers were lost while they were there.")),
      budget_refusals(m.Counter("splice_router_retry_budget_exhausted_total",
                                "Requests that ended because the router had no retry left.")),
      rate_limited(
          m.Counter("splice_rate_limited_total", "Requests refused because their API key's limit was reached.")),
      all(m),
      ttft_stages{
          &StageHistogram(m, "accept"),        &StageHistogram(m, "tokenize"), &StageHistogram(m, "queue"),
          &StageHistogram(m, "dispatch"),      &StageHistogram(m, "reserve"),  &StageHistogram(m, "prefill_worker"),
          &StageHistogram(m, "prefill_queue"), &StageHistogram(m, "lookup"),   &StageHistogram(m, "fetch"),
          &StageHistogram(m, "prefill"),       &StageHistogram(m, "network"),  &StageHistogram(m, "deliver"),
          &StageHistogram(m, "retry")} {}

void RouterMetrics::ObserveStages(const TtftStages& stages) {
  for (size_t i = 0; i < kNumTtftStages; ++i) ttft_stages[i]->Observe(stages.seconds(static_cast<TtftStage>(i)));
}

void RouterMetrics::CountError(absl::StatusCode code) {
  all.Counter("splice_request_errors_total", "Requests that ended without success.",
              {{"code", absl::StatusCodeToString(code)}})
      .Increment();
}

}  // namespace spl::router
