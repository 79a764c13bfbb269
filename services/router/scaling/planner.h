// Computes how many workers each pool should have, from the demand after reuse, from the use of KV pools, and from
// whether the targets for TTFT and TPOT are met.
//
//   prefill  ⌈tokens to compute per second / (tokens per second of a worker × utilization)⌉
//   decode   ⌈workers × their mean KV load / KV target⌉
//
// are lower limits: they keep queues short. If a target is missed although the limit is met, a tenth of the pool is
// added, at least one worker. The demand is the part of prompts left after prefix, segment and store hits: a fleet that
// reuses nine tenths of its tokens needs a tenth of the workers.
//
// Scales up at once. Scales down only to the maximum wanted during the last `down_after`, only while the latency is
// well below its target, and only when the workers to remove are idle: they are named first (leaving), get nothing new,
// and when their streams and leases have ended the lower number is published.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace spl::router {

enum class Pool { kPrefill, kDecode };
inline constexpr Pool kPools[] = {Pool::kPrefill, Pool::kDecode};
const char* PoolName(Pool pool);  // "prefill", "decode"

struct PoolLimits {
  uint32_t min_replicas = 1;
  uint32_t max_replicas = 1000;
};

struct PlannerOptions {
  double ttft_target_s = 1.0;  // 95th percentile
  double tpot_target_s = 0.05;
  double prefill_utilization = 0.7;
  double kv_target = 0.75;   // share of a decode worker's pages, or of its sequences if these are scarcer
  double sensitivity = 0.7;  // scales down only while the latency is below this share of its target
  double smoothing_s = 60;   // time constant of demand and load
  std::chrono::seconds down_after{300};
  // True: an autoscaler follows the numbers. Workers that leave then get nothing new, and the lower number waits until
  // they are idle. False: workers are named all the same, the number falls at once, and every worker stays in use.
  bool drain = false;
  // A missed target adds workers once per this time: as long as a new worker takes until it serves.
  std::chrono::seconds up_again_after{120};
  PoolLimits prefill, decode;
};

struct PlannedWorker {
  std::string worker_id;
  double load = 0;    // in any unit; the least loaded leave first
  bool busy = false;  // it has a prompt, a sequence, a reservation or a lease
};

// Observations since the last plan.
struct PlannerInput {
  std::chrono::steady_clock::time_point now;
  double interval_s = 0;
  double tokens_to_compute = 0;    // for prompts placed in the interval, after predicted reuse
  double worker_tokens_per_s = 0;  // mean over prefill workers; 0: unknown
  double decode_load = 0;          // 0 to 1, mean over decode workers: the fuller of pages and batch
  double ttft_p95_s = 0;           // 0: none seen
  double tpot_p95_s = 0;
  uint64_t waiting = 0;                        // requests for which no decode worker has room
  std::vector<PlannedWorker> prefill, decode;  // workers that serve now
};

struct PoolPlan {
  uint32_t current = 0;
  uint32_t desired = 0;  // to be published
  uint32_t wanted = 0;   // result of the formulas now; below `desired` while scaling down waits
  std::string reason;    // "demand", "ttft", "kv", "tpot", "queue", "holding", "draining", "minimum", "maximum"
  std::vector<std::string> leaving;  // workers that would go; with `drain` they get nothing new
};

// Not thread-safe.
class Planner {
 public:
  explicit Planner(const PlannerOptions& options) : options_(options) {}

  std::map<Pool, PoolPlan> Plan(const PlannerInput& input);

 private:
  struct Wanted {
    uint32_t count = 0;
    std::string reason;
  };
  struct PoolState {
    std::deque<std::pair<std::chrono::steady_clock::time_point, uint32_t>> history;  // wanted numbers by time
    std::chrono::steady_clock::time_point raised_at{};
    uint32_t raised_to = 0;
    std::set<std::string> leaving;
  };

  Wanted WantedPrefill(const PlannerInput& input) const;
  Wanted WantedDecode(const PlannerInput& input) const;
  PoolPlan Settle(const PlannerInput& input, Pool pool, Wanted wanted, bool missed, bool relaxed);

  const PlannerOptions options_;
  double demand_tokens_per_s_ = 0;
  double decode_workers_full_ = 0;  // decode load summed over workers
  bool seen_ = false;
  // time of the first plan: nothing goes down before down_after of these
  std::chrono::steady_clock::time_point began_{};
  std::map<Pool, PoolState> states_;
};

}  // namespace spl::router
