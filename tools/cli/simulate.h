// Simulates a cluster of up to thousands of workers by discrete events, to compare placement policies on one trace.
//
// Runs the real code of admission and its queue, prefix index, load tracking, placement and planner, in the order in
// which Generation calls them. Models the workers, their links and their clocks (simulate_worker.h). As in a cluster,
// the router's view (predicted index, polls every 200 ms) may differ from the workers' state (their own LRU caches).
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/policies/placement.h"
#include "services/router/scaling/planner.h"
#include "tools/cli/load_report.h"
#include "tools/cli/simulate_trace.h"
#include "tools/cli/simulate_worker.h"

namespace spl::cli {

struct SimScaling {
  router::PlannerOptions planner;
  double interval_s = 15;
  double start_s = 90;  // start time of a new worker
};

struct SimOptions {
  uint32_t prefill_workers = 8;
  uint32_t decode_workers = 8;
  // Workers per pod. A prefill worker is connected only to the decode workers of its pod. 0: one pod.
  uint32_t pod_size = 0;
  router::PlacementOptions placement;
  size_t max_queue = 1'000'000;
  double poll_s = 0.2;
  SimModel model;
  std::optional<SimScaling> scaling;  // the numbers of workers are initial ones
  uint64_t seed = 1;
};

// State in one interval of the planner.
struct SimScalePoint {
  double at_s = 0, rate = 0;         // rate: requests per second
  uint32_t prefill = 0, decode = 0;  // serving
  uint32_t desired_prefill = 0, desired_decode = 0;
  double ttft_p95_s = 0, tpot_p95_s = 0;
};

struct SimReport {
  std::string policy;
  size_t requests = 0, refused = 0;
  Percentiles ttft_ms, tpot_ms;
  double hit_rate = 0;         // share of prompt tokens not computed; an aligned token counts for what it saves
  double max_over_mean = 0;    // busy time of prefill workers: largest / mean
  double utilization = 0;      // busy share of the prefill workers
  double decision_us_p99 = 0;  // time on this machine to predict, place and insert
  double duration_s = 0;
  double worker_hours = 0;   // with scaling
  double good_fraction = 0;  // with scaling: share of requests with TTFT within its target
  std::vector<SimScalePoint> scale;
};

// Runs the simulation. Everything except decision_us_p99 is the same in every run. InvalidArgument: no worker can hold
// one of the requests.
absl::StatusOr<SimReport> Simulate(const std::vector<SimRequest>& trace, const SimOptions& options);

const char* PolicyName(router::PlacementPolicy policy);
std::string SimText(const std::vector<SimReport>& reports);
nlohmann::ordered_json SimJson(const std::vector<SimReport>& reports);
// SVG with bars of the policies' TTFT, hit rate and balance.
std::string SimFigure(const std::string& title, const std::vector<SimReport>& reports);
// SVG of load, workers and TTFT over the day.
std::string ScaleFigure(const std::string& title, const SimReport& report, const router::PlannerOptions& targets);

}  // namespace spl::cli
