#include "services/router/fleet/circuit_breaker.h"

#include <algorithm>

#include "services/base/log.h"

namespace spl::router {

CircuitBreakers::CircuitBreakers(const CircuitBreakerOptions& options, Metrics& metrics)
    : options_(options),
      open_gauge_(metrics.Gauge("splice_router_breakers_open", "Workers left alone because calls to them failed.")),
      opened_(metrics.Counter("splice_router_breaker_opened_total", "Times that a worker was left alone.")) {}

std::set<std::string> CircuitBreakers::Blocked(Clock::time_point now) const {
  std::lock_guard lock(mutex_);
  std::set<std::string> blocked;
  for (const auto& [worker_id, state] : states_) {
    if (state.open() && (now < state.open_until || state.probing)) blocked.insert(worker_id);
  }
  return blocked;
}

void CircuitBreakers::OnSent(const std::string& worker_id, Clock::time_point now) {
  std::lock_guard lock(mutex_);
  const auto found = states_.find(worker_id);
  if (found != states_.end() && found->second.open() && now >= found->second.open_until) found->second.probing = true;
}

void CircuitBreakers::OnSuccess(const std::string& worker_id) {
  std::lock_guard lock(mutex_);
  const auto found = states_.find(worker_id);
  if (found == states_.end()) return;
  if (found->second.open()) log::Info("router.breaker_closed", log::F("worker", worker_id));
  CloseLocked(found->second);
  states_.erase(found);
}

void CircuitBreakers::OnFailure(const std::string& worker_id, Clock::time_point now) {
  std::lock_guard lock(mutex_);
  State& state = states_[worker_id];
  ++state.failures;
  if (state.open()) {
    // Requests sent before it opened say nothing new.
    if (!state.probing) return;
    state.probing = false;
    state.open_time = std::min(2 * state.open_time, options_.open_time_max);
  } else if (state.failures >= options_.failures_to_open) {
    state.open_time = options_.open_time;
    open_gauge_.Increment();
    opened_.Increment();
  } else {
    return;
  }
  state.open_until = now + state.open_time;
  log::Warning("router.breaker_open", log::F("worker", worker_id), log::F("failures", state.failures),
               log::F("ms", state.open_time.count()));
}

void CircuitBreakers::OnNeither(const std::string& worker_id) {
  std::lock_guard lock(mutex_);
  const auto found = states_.find(worker_id);
  if (found != states_.end()) found->second.probing = false;
}

void CircuitBreakers::Forget(const std::string& worker_id) {
  std::lock_guard lock(mutex_);
  const auto found = states_.find(worker_id);
  if (found == states_.end()) return;
  CloseLocked(found->second);
  states_.erase(found);
}

void CircuitBreakers::CloseLocked(State& state) {
  if (state.open()) open_gauge_.Decrement();
}

}  // namespace spl::router
