// Runs the planner on this router's observations: collects each interval's numbers, plans, publishes.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "services/base/metrics.h"
#include "services/router/fleet/load_tracker.h"
#include "services/router/fleet/snapshot.h"
#include "services/router/scaling/planner.h"

namespace spl::router {

// Thread-safe. Every router plans from its own traffic. With several routers, the one that KEDA or `splice ctl` asks
// sees only its share of the demand, but all of the workers' load (docs/operating.md).
class LivePlanner {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kMaxSamples = 4096;  // latencies per interval; further ones replace the oldest

  LivePlanner(const PlannerOptions& options, std::chrono::milliseconds interval, Metrics& metrics);

  void OnPlaced(double tokens_to_compute);
  void OnTtft(double seconds);
  void OnTpot(double seconds);
  // Plans if an interval has passed since the last time. Call it as often as you like.
  void Tick(const FleetSnapshot& fleet, const LoadTracker& loads, uint64_t waiting, Clock::time_point now);

  // The plan of the last interval; empty before the first.
  std::map<Pool, PoolPlan> plan() const;
  // Workers that the plan takes away: they get nothing new while there are others. Empty without PlannerOptions::drain.
  // Never null.
  std::shared_ptr<const std::set<std::string>> leaving() const;

 private:
  struct Samples {
    std::vector<double> values;
    size_t next = 0;
    void Add(double value);
    double P95() const;  // 0 if empty
  };
  void PublishLocked(const std::map<Pool, PoolPlan>& plan);

  const bool drain_;
  const std::chrono::milliseconds interval_;
  Metrics& metrics_;
  mutable std::mutex mutex_;  // guards all below
  Planner planner_;
  Clock::time_point last_{};
  double tokens_to_compute_ = 0;
  Samples ttft_, tpot_;
  std::map<Pool, PoolPlan> plan_;
  std::shared_ptr<const std::set<std::string>> leaving_ = std::make_shared<std::set<std::string>>();
};

}  // namespace spl::router
