#include "services/router/scaling/planner.h"

#include <gtest/gtest.h>

namespace spl::router {
namespace {

using std::chrono::seconds;

class PlannerTest : public ::testing::Test {
 protected:
  // Looks every 15 s for `for_s` and returns the last plan.
  std::map<Pool, PoolPlan> Look(int for_s) {
    std::map<Pool, PoolPlan> plan;
    for (int s = 0; s < for_s; s += 15) {
      input_.now += seconds(15);
      plan = planner_.Plan(input_);
    }
    return plan;
  }
  void SetWorkers(int prefill, int decode, bool busy = false) {
    input_.prefill.clear();
    input_.decode.clear();
    for (int i = 0; i < prefill; ++i) input_.prefill.push_back({.worker_id = "p-" + std::to_string(i), .busy = busy});
    for (int i = 0; i < decode; ++i) input_.decode.push_back({.worker_id = "d-" + std::to_string(i), .busy = busy});
  }

  PlannerOptions options_{.ttft_target_s = 1,
                          .tpot_target_s = 0.05,
                          .prefill_utilization = 0.5,
                          .kv_target = 0.8,
                          .drain = true,
                          .prefill = {.min_replicas = 1, .max_replicas = 20},
                          .decode = {.min_replicas = 2, .max_replicas = 20}};
  Planner planner_{options_};
  PlannerInput input_{.now = std::chrono::steady_clock::time_point(std::chrono::hours(1)),
                      .interval_s = 15,
                      .tokens_to_compute = 15 * 10'000,
                      .worker_tokens_per_s = 5'000,
                      .decode_load = 0.8};
};

TEST_F(PlannerTest, FloorsFollowFromDemandAndLoad) {
  SetWorkers(4, 4);
  const auto plan = Look(15);
  EXPECT_EQ(plan.at(Pool::kPrefill).desired, 4u);  // 10,000 / (5,000 × 0.5)
  EXPECT_EQ(plan.at(Pool::kPrefill).reason, "demand");
  EXPECT_EQ(plan.at(Pool::kDecode).desired, 4u);
  input_.tokens_to_compute *= 4;
  input_.decode_load = 1;
  const auto grown = Look(600);
  EXPECT_EQ(grown.at(Pool::kPrefill).desired, 16u);
  EXPECT_EQ(grown.at(Pool::kDecode).desired, 5u);
}

// Reuse is part of the demand: the planner is told what is left to compute.
TEST_F(PlannerTest, LimitsBoundBothWays) {
  SetWorkers(4, 4);
  input_.tokens_to_compute *= 100;
  EXPECT_EQ(Look(600).at(Pool::kPrefill).desired, 20u);
  EXPECT_EQ(Look(15).at(Pool::kPrefill).reason, "maximum");
}

TEST_F(PlannerTest, AMissedTargetAddsOneAtATime) {
  SetWorkers(4, 4);
  Look(60);
  input_.ttft_p95_s = 2;
  EXPECT_EQ(Look(15).at(Pool::kPrefill).desired, 5u);
  EXPECT_EQ(Look(90).at(Pool::kPrefill).desired, 5u) << "the new one has had no time to help";
  SetWorkers(5, 4);
  EXPECT_EQ(Look(60).at(Pool::kPrefill).desired, 6u);
  EXPECT_EQ(Look(15).at(Pool::kPrefill).reason, "ttft");
  EXPECT_EQ(Look(15).at(Pool::kDecode).desired, 4u);
}

// Requests that wait for room on the decode side have a long TTFT for another reason.
TEST_F(PlannerTest, WaitingForRoomIsTheDecodePoolsConcern) {
  SetWorkers(4, 4);
  Look(60);
  input_.ttft_p95_s = 2;
  input_.waiting = 30;
  const auto plan = Look(15);
  EXPECT_EQ(plan.at(Pool::kPrefill).desired, 4u);
  EXPECT_EQ(plan.at(Pool::kDecode).desired, 5u);
  EXPECT_EQ(plan.at(Pool::kDecode).reason, "queue");
}

TEST_F(PlannerTest, GoesDownSlowlyAndOnlyWhenTheLastOnesAreEmpty) {
  SetWorkers(12, 4, true);
  input_.tokens_to_compute = 15 * 2'500;  // one worker
  input_.decode_load = 0.2;
  const auto early = Look(240);
  EXPECT_EQ(early.at(Pool::kPrefill).desired, 12u) << "not before down_after";
  EXPECT_EQ(early.at(Pool::kPrefill).reason, "holding");
  const auto draining = Look(600).at(Pool::kPrefill);
  EXPECT_EQ(draining.desired, 12u);
  EXPECT_EQ(draining.wanted, 1u);
  EXPECT_EQ(draining.reason, "draining");
  EXPECT_EQ(draining.leaving, (std::vector<std::string>{"p-11"})) << "what a StatefulSet takes away";
  input_.prefill.back().busy = false;
  EXPECT_EQ(Look(15).at(Pool::kPrefill).desired, 11u);
  EXPECT_EQ(Look(15).at(Pool::kDecode).desired, 4u);
}

TEST_F(PlannerTest, DoesNotGoDownWhileLatencyIsNearItsTarget) {
  SetWorkers(12, 4);
  input_.tokens_to_compute = 15 * 2'500;
  input_.ttft_p95_s = 0.9;
  EXPECT_EQ(Look(900).at(Pool::kPrefill).desired, 12u);
  input_.ttft_p95_s = 0.1;
  EXPECT_LT(Look(15).at(Pool::kPrefill).desired, 12u);
}

// A peak within the window holds the pool: no flapping.
TEST_F(PlannerTest, ARecentPeakHolds) {
  SetWorkers(4, 4);
  Look(600);
  input_.tokens_to_compute = 15 * 2'500;
  for (int i = 0; i < 6; ++i) {
    Look(120);
    input_.tokens_to_compute = 15 * 10'000;
    Look(120);
    EXPECT_GE(Look(15).at(Pool::kPrefill).desired, 3u);
    input_.tokens_to_compute = 15 * 2'500;
  }
}

TEST_F(PlannerTest, WithoutOrdinalsTheLeastLoadedLeave) {
  SetWorkers(4, 4);
  input_.tokens_to_compute = 15 * 2'500;
  Look(600);
  const char* ids[] = {"red", "green", "blue", "grey"};
  for (size_t i = 0; i < 4; ++i) input_.prefill[i] = {.worker_id = ids[i], .load = i == 2 ? 1.0 : 5.0};
  EXPECT_EQ(Look(15).at(Pool::kPrefill).leaving, (std::vector<std::string>{"blue"}));
}

}  // namespace
}  // namespace spl::router
