// A cluster of thousands of workers as discrete events, to compare placement policies on one trace.
//
// Real: admission and its queue, the prefix index, load tracking, placement and the planner, in the order in which
// Generation calls them. Modelled: the workers, their links and their clocks (simulate_worker.h). What the router
// believes (predicted index, polls every 200 ms) and what the workers have (their own least recently used caches) are
// apart, as in a cluster.
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
  double start_s = 90;  // until a new worker serves
};

struct SimOptions {
  uint32_t prefill_workers = 8;
  uint32_t decode_workers = 8;
  // Every prefill worker is connected to the decode workers of its pod only; 0: one pod.
  uint32_t pod_size = 0;
  router::PlacementOptions placement;
  size_t max_queue = 1'000'000;
  double poll_s = 0.2;
  SimModel model;
  std::optional<SimScaling> scaling;  // the numbers of workers are those at the start
  uint64_t seed = 1;
};

// Of one interval of the planner.
struct SimScalePoint {
  double at_s = 0, rate = 0;         // requests per second
  uint32_t prefill = 0, decode = 0;  // serving
  uint32_t desired_prefill = 0, desired_decode = 0;
  double ttft_p95_s = 0, tpot_p95_s = 0;
};

struct SimReport {
  std::string policy;
  size_t requests = 0, refused = 0;
  Percentiles ttft_ms, tpot_ms;
  double hit_rate = 0;         // tokens not computed, of all prompt tokens; an aligned token counts for what it saves
  double max_over_mean = 0;    // of the prefill workers' busy time
  double utilization = 0;      // of the prefill workers
  double decision_us_p99 = 0;  // of this machine: predict, place, insert
  double duration_s = 0;
  double worker_hours = 0;   // with scaling
  double good_fraction = 0;  // with scaling: TTFT within its target
  std::vector<SimScalePoint> scale;
};

// Everything but decision_us_p99 is the same on every run. InvalidArgument: a request that no worker can hold.
absl::StatusOr<SimReport> Simulate(const std::vector<SimRequest>& trace, const SimOptions& options);

const char* PolicyName(router::PlacementPolicy policy);
std::string SimText(const std::vector<SimReport>& reports);
nlohmann::ordered_json SimJson(const std::vector<SimReport>& reports);
// Bars of the policies' TTFT, hit rate and balance, as one SVG.
std::string SimFigure(const std::string& title, const std::vector<SimReport>& reports);
// Load, workers and TTFT over the day, as one SVG.
std::string ScaleFigure(const std::string& title, const SimReport& report, const router::PlannerOptions& targets);

}  // namespace spl::cli
