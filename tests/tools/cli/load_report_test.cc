#include "tools/cli/load_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace spl::cli {
namespace {

RequestResult Result(double ttft_s, double tpot_s, uint32_t tokens) {
  return {.scheduled_s = 1,
          .first_token_s = 1 + ttft_s,
          .last_token_s = 1 + ttft_s + tpot_s * (tokens - 1),
          .end_s = 1 + ttft_s + tpot_s * (tokens - 1),
          .gaps_s = std::vector<float>(tokens - 1, static_cast<float>(tpot_s)),
          .prompt_tokens = 10,
          .completion_tokens = tokens};
}

TEST(PercentilesTest, Interpolate) {
  std::vector<double> values;
  for (int i = 100; i >= 0; --i) values.push_back(i);
  const Percentiles p = PercentilesOf(values);
  EXPECT_DOUBLE_EQ(p.p50, 50);
  EXPECT_DOUBLE_EQ(p.p95, 95);
  EXPECT_DOUBLE_EQ(p.p99, 99);
  EXPECT_EQ(PercentilesOf({}).count, 0u);
  EXPECT_DOUBLE_EQ(PercentilesOf({3}).p99, 3);
}

TEST(LoadReportTest, CountsTimesAndGoodput) {
  LoadOutcome outcome{.duration_s = 10};
  outcome.results = {Result(0.1, 0.01, 11), Result(0.3, 0.01, 11), Result(0.1, 0.05, 11), {.error = "HTTP 429: full"}};
  const Slo slo{.ttft_ms = 200, .tpot_ms = 20};
  const LoadReport report = MakeReport(outcome, slo);
  EXPECT_EQ(report.num_ok, 3u);
  EXPECT_EQ(report.errors.at("HTTP 429: full"), 1u);
  EXPECT_NEAR(report.ttft_ms.p50, 100, 1e-6);
  EXPECT_NEAR(report.tpot_ms.p50, 10, 1e-6);
  EXPECT_EQ(report.itl_ms.count, 30u);
  EXPECT_DOUBLE_EQ(report.output_tokens_per_s, 3.3);
  EXPECT_DOUBLE_EQ(report.goodput_per_s, 0.1);
  EXPECT_DOUBLE_EQ(report.good_fraction, 0.25);
  EXPECT_EQ(ToJson(report, slo)["requests"]["failed"], 1);
  EXPECT_THAT(ToText(report, slo), ::testing::HasSubstr("goodput"));
}

}  // namespace
}  // namespace spl::cli
