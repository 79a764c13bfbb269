#include "services/base/metrics.h"

#include <gtest/gtest.h>

#include <algorithm>

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

TEST(MetricsDeathTest, RefusesNamesOutsideThePrefix) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(Metrics().Counter("things_total", "x"), "does not start with splice_");
}

}  // namespace
}  // namespace spl
