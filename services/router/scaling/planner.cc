#include "services/router/scaling/planner.h"

#include <algorithm>
#include <cmath>

namespace spl::router {
namespace {

uint32_t CeilOf(double value) { return static_cast<uint32_t>(std::clamp(std::ceil(value - 1e-9), 0.0, 1e6)); }

// The number after the last '-', as in names of a StatefulSet's pods; -1: none.
int64_t OrdinalOf(const std::string& id) {
  const size_t dash = id.rfind('-');
  if (dash == std::string::npos || dash + 1 == id.size() || id.size() - dash > 10) return -1;
  if (id.find_first_not_of("0123456789", dash + 1) != std::string::npos) return -1;
  return std::stoll(id.substr(dash + 1));
}

// Sorts workers in the order in which they leave: the highest ordinals first, because a StatefulSet removes those;
// without ordinals, the least loaded first.
std::vector<const PlannedWorker*> InOrderOfLeaving(const std::vector<PlannedWorker>& workers) {
  std::vector<const PlannedWorker*> order;
  for (const PlannedWorker& w : workers) order.push_back(&w);
  const bool numbered =
      std::all_of(workers.begin(), workers.end(), [](const PlannedWorker& w) { return OrdinalOf(w.worker_id) >= 0; });
  std::stable_sort(order.begin(), order.end(), [&](const PlannedWorker* a, const PlannedWorker* b) {
    return numbered ? OrdinalOf(a->worker_id) > OrdinalOf(b->worker_id) : a->load < b->load;
  });
  return order;
}

}  // namespace

const char* PoolName(Pool pool) { return pool == Pool::kPrefill ? "prefill" : "decode"; }

Planner::Wanted Planner::WantedPrefill(const PlannerInput& input) const {
  if (input.worker_tokens_per_s <= 0) return {static_cast<uint32_t>(input.prefill.size()), "holding"};
  return {CeilOf(demand_tokens_per_s_ / (input.worker_tokens_per_s * options_.prefill_utilization)), "demand"};
}

Planner::Wanted Planner::WantedDecode(const PlannerInput&) const {
  return {CeilOf(decode_workers_full_ / options_.kv_target), "kv"};
}

std::map<Pool, PoolPlan> Planner::Plan(const PlannerInput& input) {
  const double weight = seen_ ? 1 - std::exp(-input.interval_s / options_.smoothing_s) : 1;
  if (!seen_) began_ = input.now;
  seen_ = true;
  const double demand = input.interval_s > 0 ? input.tokens_to_compute / input.interval_s : 0;
  demand_tokens_per_s_ += weight * (demand - demand_tokens_per_s_);
  const double full = input.decode_load * static_cast<double>(input.decode.size());
  decode_workers_full_ += weight * (full - decode_workers_full_);

  Wanted prefill = WantedPrefill(input), decode = WantedDecode(input);
  const bool ttft_missed = input.ttft_p95_s > options_.ttft_target_s;
  const bool tpot_missed = input.tpot_p95_s > options_.tpot_target_s;
  // Who waits for room on the decode side waits before his prompt is computed: more prefill workers would not help.
  const bool no_room = input.waiting > 0;
  if (ttft_missed && !no_room) prefill.reason = "ttft";
  if (tpot_missed) decode.reason = "tpot";
  if (no_room) decode.reason = "queue";
  const double relaxed_ttft = options_.sensitivity * options_.ttft_target_s;
  const double relaxed_tpot = options_.sensitivity * options_.tpot_target_s;
  return {{Pool::kPrefill,
           Settle(input, Pool::kPrefill, std::move(prefill), ttft_missed && !no_room, input.ttft_p95_s < relaxed_ttft)},
          {Pool::kDecode, Settle(input, Pool::kDecode, std::move(decode), tpot_missed || no_room,
                                 input.tpot_p95_s < relaxed_tpot && !no_room)}};
}

PoolPlan Planner::Settle(const PlannerInput& input, Pool pool, Wanted wanted, bool missed, bool relaxed) {
  const PoolLimits& limits = pool == Pool::kPrefill ? options_.prefill : options_.decode;
  const std::vector<PlannedWorker>& workers = pool == Pool::kPrefill ? input.prefill : input.decode;
  PoolState& state = states_[pool];
  const auto current = static_cast<uint32_t>(workers.size());
  if (missed) {
    // Workers added for the last miss must have had time to help.
    if (input.now - state.raised_at >= options_.up_again_after || state.raised_to == 0) {
      state.raised_at = input.now;
      state.raised_to = current + std::max(1u, current / 10);
    }
    wanted.count = std::max(wanted.count, state.raised_to);
  } else if (input.now - state.raised_at >= options_.up_again_after) {
    state.raised_to = 0;
  }
  if (wanted.count < limits.min_replicas) wanted = {limits.min_replicas, "minimum"};
  if (wanted.count > limits.max_replicas) wanted = {limits.max_replicas, "maximum"};
  state.history.emplace_back(input.now, wanted.count);
  while (input.now - state.history.front().first > options_.down_after) state.history.pop_front();
  uint32_t highest = 0;
  for (const auto& [when, count] : state.history) highest = std::max(highest, count);

  PoolPlan plan{.current = current, .desired = wanted.count, .wanted = wanted.count, .reason = wanted.reason};
  if (wanted.count >= current) {
    state.leaving.clear();
    return plan;
  }
  // Scales down, but not below the recently wanted number, and one step at a time: a tenth of the pool.
  uint32_t target = std::max(highest, current - std::max(1u, current / 10));
  if (!relaxed || target >= current || input.now - began_ < options_.down_after) {
    state.leaving.clear();
    plan.desired = current;
    plan.reason = "holding";
    return plan;
  }
  state.leaving.clear();
  bool busy = false;
  for (const PlannedWorker* w : InOrderOfLeaving(workers)) {
    if (state.leaving.size() == current - target) break;
    state.leaving.insert(w->worker_id);
    busy |= w->busy;
  }
  plan.leaving.assign(state.leaving.begin(), state.leaving.end());
  const bool waits = busy && options_.drain;
  plan.desired = waits ? current : target;
  if (waits) plan.reason = "draining";
  return plan;
}

}  // namespace spl::router
