#include "services/router/scaling/live_planner.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace spl::router {
namespace {

constexpr const char* kReasons[] = {"demand",  "ttft",     "kv",      "tpot",   "queue",
                                    "holding", "draining", "minimum", "maximum"};

double LoadOf(const DecodeView& d) {
  const double pages =
      d.total_pages == 0 ? 0 : 1 - static_cast<double>(d.free_pages) / static_cast<double>(d.total_pages);
  const double batch = d.max_sequences == 0 ? 0 : static_cast<double>(d.sequences) / d.max_sequences;
  return std::max(pages, batch);
}

}  // namespace

LivePlanner::LivePlanner(const PlannerOptions& options, std::chrono::milliseconds interval, Metrics& metrics)
    : drain_(options.drain), interval_(interval), metrics_(metrics), planner_(options) {}

void LivePlanner::Samples::Add(double value) {
  if (values.size() < kMaxSamples) {
    values.push_back(value);
  } else {
    values[next++ % kMaxSamples] = value;
  }
}

double LivePlanner::Samples::P95() const {
  if (values.empty()) return 0;
  std::vector<double> sorted = values;
  const auto at = sorted.begin() + static_cast<ptrdiff_t>(0.95 * static_cast<double>(sorted.size() - 1));
  std::nth_element(sorted.begin(), at, sorted.end());
  return *at;
}

void LivePlanner::OnPlaced(double tokens_to_compute) {
  std::lock_guard lock(mutex_);
  tokens_to_compute_ += tokens_to_compute;
}

void LivePlanner::OnTtft(double seconds) {
  std::lock_guard lock(mutex_);
  ttft_.Add(seconds);
}

void LivePlanner::OnTpot(double seconds) {
  std::lock_guard lock(mutex_);
  tpot_.Add(seconds);
}

void LivePlanner::Tick(const FleetSnapshot& fleet, const LoadTracker& loads, uint64_t waiting, Clock::time_point now) {
  std::lock_guard lock(mutex_);
  if (last_ == Clock::time_point()) last_ = now;
  if (now - last_ < interval_ || fleet.prefill.empty() || fleet.decode.empty()) return;
  PlannerInput input{.now = now,
                     .interval_s = std::chrono::duration<double>(now - std::exchange(last_, now)).count(),
                     .tokens_to_compute = std::exchange(tokens_to_compute_, 0),
                     .ttft_p95_s = ttft_.P95(),
                     .tpot_p95_s = tpot_.P95(),
                     .waiting = waiting};
  ttft_ = tpot_ = {};
  double rates = 0, load = 0;
  size_t measured = 0;
  for (const PrefillView& p : fleet.prefill) {
    const uint64_t tokens = std::max(p.queued_tokens, loads.Of(p.worker_id).prefill_tokens);
    if (p.tokens_per_s > 0) rates += p.tokens_per_s, ++measured;
    input.prefill.push_back({.worker_id = p.worker_id, .load = static_cast<double>(tokens), .busy = tokens > 0});
  }
  for (const DecodeView& d : fleet.decode) {
    const uint32_t sequences = std::max(d.sequences, loads.Of(d.worker_id).sequences);
    load += LoadOf(d);
    // Reservations and leases are counted in d.sequences.
    input.decode.push_back({.worker_id = d.worker_id, .load = LoadOf(d), .busy = sequences > 0});
  }
  input.worker_tokens_per_s = measured > 0 ? rates / static_cast<double>(measured) : 0;
  input.decode_load = load / static_cast<double>(fleet.decode.size());
  plan_ = planner_.Plan(input);
  auto leaving = std::make_shared<std::set<std::string>>();
  for (const auto& [pool, plan] : plan_) {
    if (drain_) leaving->insert(plan.leaving.begin(), plan.leaving.end());
  }
  leaving_ = std::move(leaving);
  PublishLocked(plan_);
}

void LivePlanner::PublishLocked(const std::map<Pool, PoolPlan>& plans) {
  for (const auto& [pool, plan] : plans) {
    const std::string name = PoolName(pool);
    metrics_.Gauge("splice_pool_desired_replicas", "Workers that the pool should have.", {{"pool", name}})
        .Set(plan.desired);
    for (const char* reason : kReasons) {
      metrics_
          .Gauge("splice_pool_desired_reason", "1 for the reason of the desired number.",
                 {{"pool", name}, {"reason", reason}})
          .Set(plan.reason == reason ? 1 : 0);
    }
  }
}

std::map<Pool, PoolPlan> LivePlanner::plan() const {
  std::lock_guard lock(mutex_);
  return plan_;
}

std::shared_ptr<const std::set<std::string>> LivePlanner::leaving() const {
  std::lock_guard lock(mutex_);
  return leaving_;
}

}  // namespace spl::router
