#include "services/base/metrics.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "services/base/vllm_metrics.h"

namespace spl {
namespace {

TEST(Metrics, RendersCountersGaugesAndHistograms) {
  Metrics metrics(MetricLabels{{"worker_id", "w1"}});
  metrics.Counter("splice_things_total", "Things.", {{"kind", "a"}}).Increment(2);
  metrics.Counter("splice_things_total", "Things.", {{"kind", "a"}}).Increment();
  metrics.Gauge(metric::kKvCacheUsagePerc, "Use.").Set(0.5);
  metrics.Histogram(metric::kTimeToFirstTokenSeconds, "TTFT.", buckets::TimeToFirstToken()).Observe(0.03);
  const std::string text = metrics.Render();
  EXPECT_NE(text.find("# TYPE splice_things_total counter"), std::string::npos) << text;
  EXPECT_NE(text.find("splice_things_total{worker_id=\"w1\",kind=\"a\"} 3"), std::string::npos) << text;
  EXPECT_NE(text.find("splice_kv_cache_usage_perc{worker_id=\"w1\"} 0.5"), std::string::npos) << text;
  EXPECT_NE(text.find("splice_time_to_first_token_seconds_bucket{worker_id=\"w1\",le=\"0.02\"} 0"), std::string::npos);
  EXPECT_NE(text.find("splice_time_to_first_token_seconds_bucket{worker_id=\"w1\",le=\"0.04\"} 1"), std::string::npos);
}

TEST(Metrics, InstancesShareNothing) {
  Metrics first;
  Metrics second;
  first.Counter("splice_only_first_total", "x").Increment();
  EXPECT_EQ(second.Render().find("splice_only_first_total"), std::string::npos);
}

TEST(Metrics, BucketsAscend) {
  for (const auto* set : {&buckets::TimeToFirstToken(), &buckets::InterToken(), &buckets::RequestLatency(),
                          &buckets::Stage(), &buckets::Decision(), &buckets::Tokens()}) {
    EXPECT_TRUE(std::is_sorted(set->begin(), set->end(), std::less_equal<>()));
  }
  EXPECT_EQ(buckets::TimeToFirstToken().front(), 0.001);
  EXPECT_EQ(buckets::TimeToFirstToken().back(), 2560);
}

TEST(VllmMetrics, SayTheSameUnderBothNames) {
  Metrics metrics;
  metrics.Gauge(metric::kKvCacheUsagePerc, "Use.").Set(0.25);
  metrics.Counter(metric::kRequestSuccessTotal, "Done.", {{"finished_reason", "stop"}}).Increment(3);
  metrics.Histogram(metric::kInterTokenLatencySeconds, "ITL.", buckets::InterToken()).Observe(0.02);
  metrics.Counter(metric::kKvTransferBytesTotal, "Only here.", {{"direction", "out"}}).Increment();
  for (const auto& [kind, tokens] : {std::pair{"prefix", 64}, {"session", 32}, {"segment", 128}, {"miss", 10}})
    metrics.Counter(metric::kReuseTokensTotal, "Reuse.", {{"kind", kind}}).Increment(tokens);
  const std::string text = RenderMetrics(metrics, "a \"model\"");
  for (const char* line :
       {"# TYPE vllm:kv_cache_usage_perc gauge", "vllm:kv_cache_usage_perc{model_name=\"a \\\"model\\\"\"} 0.25",
        "vllm:gpu_cache_usage_perc{model_name=\"a \\\"model\\\"\"} 0.25",
        "vllm:request_success_total{finished_reason=\"stop\",model_name=\"a \\\"model\\\"\"} 3",
        "# TYPE vllm:time_per_output_token_seconds histogram",
        "vllm:inter_token_latency_seconds_bucket{model_name=\"a \\\"model\\\"\",le=\"0.025\"} 1",
        "vllm:time_per_output_token_seconds_count{model_name=\"a \\\"model\\\"\"} 1",
        "vllm:prefix_cache_queries_total{model_name=\"a \\\"model\\\"\"} 234",
        "vllm:prefix_cache_hits_total{model_name=\"a \\\"model\\\"\"} 224", "splice_kv_cache_usage_perc 0.25"})
    EXPECT_NE(text.find(std::string(line) + "\n"), std::string::npos) << line << "\n" << text;
  EXPECT_EQ(text.find("vllm:kv_transfer"), std::string::npos);
  // A metric that this program does not have has no series: 0 would say that it had counted.
  EXPECT_EQ(text.find("vllm:num_requests_waiting"), std::string::npos);
  EXPECT_EQ(RenderMetrics(metrics, ""), metrics.Render());
  EXPECT_EQ(metrics.Render().find("vllm:"), std::string::npos);
}

TEST(ProgramMetrics, OfOneProcessAreAPageWithTheirComponents) {
  Metrics router, decode;
  router.Gauge(metric::kNumRequestsRunning, "Running.").Set(3);
  router.Counter(metric::kRequestSuccessTotal, "Done.", {{"finished_reason", "stop"}}).Increment();
  decode.Gauge(metric::kNumRequestsRunning, "Running.").Set(2);
  decode.Gauge(metric::kKvCacheUsagePerc, "Use.").Set(0.5);
  const ProgramMetrics programs[] = {{"router", &router}, {"decode", &decode}};
  const std::string text = RenderMetrics(programs, "m");
  for (const char* line :
       {"splice_num_requests_running{component=\"router\"} 3", "splice_num_requests_running{component=\"decode\"} 2",
        "splice_request_success_total{component=\"router\",finished_reason=\"stop\"} 1",
        "splice_kv_cache_usage_perc{component=\"decode\"} 0.5", "vllm:num_requests_running{model_name=\"m\"} 3",
        "vllm:kv_cache_usage_perc{model_name=\"m\"} 0.5"})
    EXPECT_NE(text.find(std::string(line) + "\n"), std::string::npos) << line << "\n" << text;
  // A family is one, whoever has it.
  const std::string type = "# TYPE splice_num_requests_running gauge";
  EXPECT_EQ(text.find(type), text.rfind(type));
  EXPECT_EQ(text.find("vllm:num_requests_running{model_name=\"m\"} 2"), std::string::npos);
  EXPECT_EQ(RenderMetrics(programs, "").find("vllm:"), std::string::npos);
}

TEST(MetricsDeathTest, RefusesNamesOutsideThePrefix) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(Metrics().Counter("things_total", "x"), "does not start with splice_");
}

}  // namespace
}  // namespace spl
