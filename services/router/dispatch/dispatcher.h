// Everything that requests share: the model, the fleet, placement, admission, metrics. The two front doors hand it
// plain requests; it knows neither HTTP nor the public gRPC API.
#pragma once

#include <boost/asio/io_context.hpp>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "services/base/trace.h"
#include "services/router/admission/admission.h"
#include "services/router/admission/auth.h"
#include "services/router/admission/rate_limits.h"
#include "services/router/admission/retry_budget.h"
#include "services/router/fleet/cache_view.h"
#include "services/router/fleet/circuit_breaker.h"
#include "services/router/fleet/fleet.h"
#include "services/router/fleet/prefix_index.h"
#include "services/router/fleet/workers.h"
#include "services/router/policies/foreign_load.h"
#include "services/router/policies/placement.h"
#include "services/router/policies/request_costs.h"
#include "services/router/request/request.h"
#include "services/router/request/served_model.h"
#include "services/router/scaling/live_planner.h"
#include "services/router/telemetry/request_log.h"
#include "services/router/telemetry/router_metrics.h"

namespace spl::router {

class Generation;

struct DispatchOptions {
  FleetOptions fleet;
  PlacementOptions placement;
  PrefixIndexOptions prefix_index;
  bool has_store = false;  // the prefill workers keep chunks in a store behind them all
  AdmissionOptions admission;
  PlannerOptions planner;
  std::chrono::milliseconds plan_interval{15'000};
  uint32_t max_attempts = 3;    // prefills started before the first token
  uint32_t max_migrations = 3;  // moves to another decode worker after it
  // A request is refused when as many workers were lost while it was there: it may be what kills them.
  uint32_t max_kills = 2;
  std::chrono::milliseconds fate_timeout{1'000};  // how long it waits to hear whether a worker that broke off is lost
  RetryBudgetOptions retry_budget;
  CircuitBreakerOptions breaker;
  CacheViewOptions cache_view;
  // Of a worker whose cache is known, the router's own guess counts only this long: until what was sent there is
  // computed and reported.
  std::chrono::seconds guess_ttl{10};
  std::chrono::milliseconds retry_backoff{100};  // times the attempt's number, when no other worker is left
  // How long a request waits, retry_backoff at a time, until a pair of workers can take it: about a restart's time.
  std::chrono::milliseconds worker_wait{5'000};
  std::chrono::milliseconds reserve_timeout{2'000};
  std::chrono::milliseconds release_timeout{5'000};
  // Until a prefill worker has said that nothing more is written to a ticket that was given up: a slice's time, and
  // that of the flush.
  std::chrono::milliseconds revoke_timeout{30'000};
  // Applies when the client gives none, and bounds what it gives.
  std::chrono::milliseconds request_timeout{600'000};
  // How long a decode worker keeps pages for a prompt that does not come: this, and the time that placement expects it
  // to take as often as this. A long queue must not cost a request its pages; the worker has an upper bound of its own.
  std::chrono::milliseconds ticket_ttl{60'000};
  double ticket_ttl_per_expected = 4;
};

// Thread-safe. Must outlive its generations: Drain or CancelAll before destruction, then stop the io_context.
class Dispatcher {
 public:
  Dispatcher(boost::asio::io_context& io, DispatchOptions options, const ServedModel& model,
             const NamespaceKeys& namespace_keys, Metrics& metrics, const Tracer& tracer);

  void Start();
  // Refuses new requests and waits for the running ones; those left at `deadline` are cancelled. Blocks.
  void Drain(std::chrono::steady_clock::time_point deadline);
  // Cancels what is left and waits until no call to a worker is open: nothing runs on gRPC's threads for us afterwards.
  void Stop();

  // The request's place in a trace: that of the client's traceparent, or a new one.
  void BeginTrace(GenerationRequest& request, std::string_view traceparent, std::string_view tracestate) const;
  // Counts a request against its caller's limits before anything of it is parsed. ResourceExhausted: see RateLimits.
  absl::StatusOr<RateLimits::Lease> Admit(const Caller& caller);
  // InvalidArgument: more tokens than are counted or written out for a caller, four contexts.
  absl::Status CheckCounted(size_t num_tokens, const std::string& param) const;

  // Makes a generation, which holds `lease` while it lives; call its Start to run it. Clamps the deadline, draws
  // request id and seed and begins a trace where unset.
  std::shared_ptr<Generation> Create(GenerationRequest request, std::shared_ptr<GenerationSink> sink,
                                     RateLimits::Lease lease);

  boost::asio::io_context& io() { return io_; }
  const DispatchOptions& options() const { return options_; }
  const ServedModel& model() const { return model_; }
  const NamespaceKeys& namespace_keys() const { return namespace_keys_; }
  Fleet& fleet() { return *fleet_; }
  Admission& admission() { return admission_; }
  PrefixIndex& prefix_index() { return prefix_index_; }
  RequestCosts& costs() { return costs_; }
  LivePlanner& planner() { return planner_; }
  RateLimits& limits() { return *limits_; }
  const ForeignLoad& foreign_load() const { return foreign_load_; }
  RequestLog& requests() { return requests_; }
  const Placement& placement() const { return placement_; }
  LoadTracker& loads() { return *loads_; }
  // What each of these workers would not have to compute: of leading chunks and of segments as it says itself, and what
  // was just sent there; of those that do not say, and of the store, as this router guesses.
  std::vector<PredictedReuse> PredictReuse(const PromptKeys& keys, std::span<const PrefixIndex::Holder> holders);
  // The prompt was sent there (PrefixIndex::Insert).
  void NoteSent(const PromptKeys& keys, const PrefixIndex::Holder& holder, uint32_t exact_tokens);
  CircuitBreakers& breakers() { return breakers_; }
  RetryBudget& retry_budget() { return retry_budget_; }
  RouterMetrics& metrics() { return metrics_; }
  const Tracer& tracer() const { return tracer_; }

  // The longest context that is served: the workers' word, else the model folder's.
  uint32_t max_context() const;
  // A request would be taken: the fleet serves and the router is not draining.
  bool ready() const { return !admission_.closed() && fleet_->snapshot()->Serves(); }
  size_t num_active() const;
  // Ends the requests of this id that are under way (clients may name two alike); how many these were.
  size_t Cancel(const std::string& request_id, const absl::Status& reason);

 private:
  friend class Generation;
  // The request's work is over, its result not handed over yet …
  void OnFinished(uint64_t id);
  // … and now it is: Drain need not wait for it any more.
  void OnDelivered(uint64_t id);
  std::vector<std::shared_ptr<Generation>> Active() const;

  boost::asio::io_context& io_;
  const DispatchOptions options_;
  const ServedModel& model_;
  const NamespaceKeys& namespace_keys_;
  RouterMetrics metrics_;
  const Tracer& tracer_;
  const std::shared_ptr<CallTracker> calls_ = std::make_shared<CallTracker>();
  const std::shared_ptr<CacheView> caches_;
  const std::shared_ptr<Fleet> fleet_;
  const std::shared_ptr<LoadTracker> loads_ = std::make_shared<LoadTracker>();
  const Placement placement_;
  PrefixIndex prefix_index_;
  PrefixIndex recent_index_;  // the same with guess_ttl
  RequestCosts costs_;
  ForeignLoad foreign_load_;
  const std::shared_ptr<RateLimits> limits_ = std::make_shared<RateLimits>();
  LivePlanner planner_;
  RequestLog requests_;
  CircuitBreakers breakers_;
  RetryBudget retry_budget_;
  Admission admission_;
  mutable std::mutex mutex_;  // guards the two below
  std::condition_variable idle_;
  uint64_t next_id_ = 1;
  std::map<uint64_t, std::weak_ptr<Generation>> active_;
};

}  // namespace spl::router
