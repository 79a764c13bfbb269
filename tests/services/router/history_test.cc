// The samples behind the charts of the operators' page.
#include "services/router/telemetry/history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "services/router/telemetry/request_log.h"

namespace spl::router {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class HistoryTest : public ::testing::Test {
 protected:
  History Make(size_t max_samples = 360) {
    return History({.period = seconds(5), .max_samples = max_samples, .ttft_bounds = {1, 2}, .inter_token_bounds = {1}},
                   clock_);
  }
  // After `gap`; returns the samples of all time.
  std::vector<HistorySample> Add(History& history, const HistoryReading& now, milliseconds gap = seconds(5)) {
    clock_.Advance(gap);
    history.Add(now);
    return history.Samples(std::chrono::hours(1'000));
  }

  FakeClock clock_;
};

// Observations are as likely anywhere in a bucket: ten in (1, 2] have their middle at 1.5.
TEST(QuantileOfBucketsTest, InterpolatesWithinABucket) {
  const std::vector<double> bounds = {1, 2, 4};
  EXPECT_DOUBLE_EQ(QuantileOfBuckets(bounds, std::vector<uint64_t>{0, 10, 0, 0}, 0.5), 1.5);
  EXPECT_DOUBLE_EQ(QuantileOfBuckets(bounds, std::vector<uint64_t>{10, 0, 0, 0}, 1.0), 1);
  EXPECT_DOUBLE_EQ(QuantileOfBuckets(bounds, std::vector<uint64_t>{5, 0, 5, 0}, 0.75), 3);
  EXPECT_DOUBLE_EQ(QuantileOfBuckets(bounds, std::vector<uint64_t>{0, 0, 0, 3}, 0.5), 4) << "above all bounds";
  EXPECT_DOUBLE_EQ(QuantileOfBuckets(bounds, std::vector<uint64_t>{0, 4, 0, 0}, 0.0), 1);
  EXPECT_TRUE(std::isnan(QuantileOfBuckets(bounds, std::vector<uint64_t>{0, 0, 0, 0}, 0.5)));
}

// Whatever the counts: between the first and the last bucket that has any, and higher for a higher quantile.
TEST(QuantileOfBucketsTest, GrowsWithTheQuantile) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const std::vector<double> bounds = {0.001, 0.01, 0.5, 3, 80};
  for (int round = 0; round < 200; ++round) {
    std::vector<uint64_t> counts(bounds.size() + 1);
    for (uint64_t& count : counts) count = random() % 3 == 0 ? random() % 1'000 : 0;
    counts[random() % counts.size()] += 1;
    double last = 0;
    for (const double quantile : {0.01, 0.5, 0.95, 0.99, 1.0}) {
      const double value = QuantileOfBuckets(bounds, counts, quantile);
      EXPECT_GE(value, last);
      EXPECT_LE(value, bounds.back());
      last = value;
    }
  }
}

TEST_F(HistoryTest, RatesAreOverTheTimeThatPassed) {
  History history = Make();
  EXPECT_TRUE(history.Due()) << "a beginning";
  EXPECT_TRUE(Add(history, {.output_tokens = 100, .requests = 7}).empty()) << "one reading makes no period";
  EXPECT_FALSE(history.Due());
  auto samples = Add(history, {.output_tokens = 150, .requests = 8, .errors = 1, .running = 3, .waiting = 2});
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_DOUBLE_EQ(samples[0].output_tokens_per_s, 10);
  EXPECT_DOUBLE_EQ(samples[0].requests_per_s, 0.2);
  EXPECT_DOUBLE_EQ(samples[0].errors_per_s, 0.2);
  EXPECT_EQ(samples[0].running, 3);
  EXPECT_EQ(samples[0].waiting, 2);
  samples = Add(history, {.output_tokens = 350}, seconds(20));
  ASSERT_EQ(samples.size(), 2u) << "a late reading is one long period";
  EXPECT_DOUBLE_EQ(samples[1].output_tokens_per_s, 10);
}

TEST_F(HistoryTest, AddsNothingBeforeItsPeriodIsOver) {
  History history = Make();
  Add(history, {});
  EXPECT_TRUE(Add(history, {.output_tokens = 50}, milliseconds(4'999)).empty());
  const auto samples = Add(history, {.output_tokens = 60}, milliseconds(1));
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_DOUBLE_EQ(samples[0].output_tokens_per_s, 12) << "the early reading was no beginning of a period";
}

// A percentile is that of its own period: what was observed before does not count.
TEST_F(HistoryTest, PercentilesAreOfThePeriod) {
  History history = Make();
  Add(history, {.ttft = {100, 0, 0}, .inter_token = {50, 0}});
  auto samples = Add(history, {.ttft = {100, 10, 0}, .inter_token = {50, 0}});
  EXPECT_DOUBLE_EQ(samples[0].ttft_p50_s, 1.5);
  EXPECT_DOUBLE_EQ(samples[0].ttft_p99_s, 1.99);
  EXPECT_TRUE(std::isnan(samples[0].itl_p50_s)) << "nothing was observed";
  samples = Add(history, {.ttft = {100, 10, 0}, .inter_token = {60, 0}});
  EXPECT_TRUE(std::isnan(samples[1].ttft_p95_s));
  EXPECT_DOUBLE_EQ(samples[1].itl_p50_s, 0.5);
}

TEST_F(HistoryTest, AnEmptyHistogramIsABeginning) {
  History history = Make();
  Add(history, {});  // no observation yet: no buckets
  const auto samples = Add(history, {.ttft = {4, 0, 0}, .inter_token = {0, 0}});
  EXPECT_DOUBLE_EQ(samples[0].ttft_p50_s, 0.5);
}

TEST_F(HistoryTest, ACounterThatGoesBackIsNoNegativeRate) {
  History history = Make();
  Add(history, {.output_tokens = 500, .ttft = {9, 9, 9}});
  const auto samples = Add(history, {.output_tokens = 20, .ttft = {1, 0, 0}});
  EXPECT_EQ(samples[0].output_tokens_per_s, 0);
  EXPECT_TRUE(std::isnan(samples[0].ttft_p50_s));
}

TEST_F(HistoryTest, SharesOfPages) {
  History history = Make();
  Add(history, {});
  const auto samples = Add(history, {.decode_used_pages = 30, .decode_total_pages = 40});
  EXPECT_DOUBLE_EQ(samples[0].decode_kv_share, 0.75);
  EXPECT_TRUE(std::isnan(samples[0].prefill_kv_share)) << "no worker says how many it has";
}

// A clock that stands still, or a caller that comes at once again: no division by nothing, no second sample.
TEST_F(HistoryTest, TimeThatStandsStillAddsNothing) {
  History history = Make();
  Add(history, {});
  Add(history, {.output_tokens = 10});
  EXPECT_EQ(Add(history, {.output_tokens = 20}, milliseconds(0)).size(), 1u);
}

TEST_F(HistoryTest, KeepsTheLastSamplesInOneAllocation) {
  History history = Make(4);
  for (int i = 0; i <= 11; ++i) Add(history, {.output_tokens = 5.0 * i * i});
  const auto samples = history.Samples(seconds(1'000));
  ASSERT_EQ(samples.size(), 4u);
  for (size_t i = 0; i < samples.size(); ++i) {
    // 5 ((k + 1)² − k²) tokens in five seconds.
    EXPECT_DOUBLE_EQ(samples[i].output_tokens_per_s, 2.0 * (7.0 + static_cast<double>(i)) + 1) << i;
  }
  EXPECT_EQ(history.span(), seconds(20));
  EXPECT_EQ(history.Samples(seconds(5)).size(), 2u) << "now, and five seconds ago";
  EXPECT_LE(360 * sizeof(HistorySample), 64u << 10) << "half an hour";
}

TEST(HistoryColumnsTest, HaveNamesOfTheirOwn) {
  std::vector<std::string_view> names;
  for (const HistoryColumn& column : HistoryColumns()) names.push_back(column.name);
  const size_t count = names.size();
  // All members but the time.
  EXPECT_EQ(count, (sizeof(HistorySample) - sizeof(SteadyTime)) / sizeof(double));
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::unique(names.begin(), names.end()) - names.begin(), static_cast<std::ptrdiff_t>(count));
}

TEST(RequestTotalsTest, CountTheSuccessfulOnesTokens) {
  RequestLog log(1);
  const auto end = [&](uint64_t id, const std::string& status) {
    log.Begin(id, {.request_id = std::to_string(id)});
    log.End(id, [&](RequestRecord& r) {
      r.status = status;
      r.prompt_tokens = 100;
      r.ran = RequestRan{.prefix_tokens = 40, .stored_tokens = 10, .aligned_tokens = 30, .recomputed_tokens = 5};
    });
  };
  end(1, "OK");
  end(2, "UNAVAILABLE: no worker");
  end(3, "CANCELLED: the client left");
  const RequestTotals totals = log.Totals();
  EXPECT_EQ(totals.ended, 3u);
  EXPECT_EQ(totals.failed, 1u);
  EXPECT_EQ(totals.prompt_tokens, 100u);
  EXPECT_EQ(totals.prefix_tokens, 40u);
  EXPECT_EQ(totals.stored_tokens, 10u);
  EXPECT_EQ(totals.aligned_tokens, 30u);
  EXPECT_EQ(totals.recomputed_tokens, 5u);
}

TEST(RequestLogFindTest, TheOneUnderWayBeforeTheOneThatEnded) {
  RequestLog log;
  for (const uint64_t id : {1, 2}) log.Begin(id, {.request_id = "twice", .caller = std::to_string(id)});
  log.End(2, [](RequestRecord& r) { r.status = "OK"; });
  EXPECT_EQ(log.Find("twice")->caller, "1");
  log.End(1, [](RequestRecord& r) { r.status = "OK"; });
  EXPECT_EQ(log.Find("twice")->caller, "1") << "the last one that ended";
  EXPECT_FALSE(log.Find("never").has_value());
}

}  // namespace
}  // namespace spl::router
