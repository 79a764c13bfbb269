// State shared by all requests: the model, the fleet, placement, admission, metrics. The two front ends pass plain
// requests; this knows neither HTTP nor the public gRPC API.
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
#include "services/grammar/grammar_cache.h"
#include "services/router/admission/admission.h"
#include "services/router/admission/auth.h"
#include "services/router/admission/rate_limits.h"
#include "services/router/admission/retry_budget.h"
#include "services/router/fleet/cache_view.h"
#include "services/router/fleet/circuit_breaker.h"
#include "services/router/fleet/decode_sessions.h"
#include "services/router/fleet/fleet.h"
#include "services/router/fleet/prefix_index.h"
#include "services/router/fleet/workers.h"
#include "services/router/policies/foreign_load.h"
#include "services/router/policies/placement.h"
#include "services/router/policies/request_costs.h"
#include "services/router/request/request.h"
#include "services/router/request/served_model.h"
#include "services/router/scaling/live_planner.h"
#include "services/router/telemetry/quality_records.h"
#include "services/router/telemetry/request_log.h"
#include "services/router/telemetry/router_metrics.h"

namespace spl::router {

class Generation;

struct DispatchOptions {
  FleetOptions fleet;
  PlacementOptions placement;
  PrefixIndexOptions prefix_index;
  bool has_store = false;  // the prefill workers share a chunk store
  AdmissionOptions admission;
  PlannerOptions planner;
  std::chrono::milliseconds plan_interval{15'000};
  uint32_t max_attempts = 3;    // limit of prefills started before the first token
  uint32_t max_migrations = 3;  // limit of moves to another decode worker after it
  // A request is refused after this many workers were lost while serving it: it may be the cause.
  uint32_t max_kills = 2;
  // wait for the fleet to say whether a worker whose call broke off is lost
  std::chrono::milliseconds fate_timeout{1'000};
  RetryBudgetOptions retry_budget;
  CircuitBreakerOptions breaker;
  CacheViewOptions cache_view;
  // For a worker with a known cache, the router's own guess counts only this long: until the prompt sent there has been
  // computed and reported.
  std::chrono::seconds guess_ttl{10};
  std::chrono::milliseconds retry_backoff{100};  // times the attempt's number, if no other worker is left
  // Longest wait of a request, in steps of retry_backoff, until a pair of workers can take it: about the time of a
  // restart.
  std::chrono::milliseconds worker_wait{5'000};
  std::chrono::milliseconds reserve_timeout{2'000};
  // More, for a worker that compiles a grammar: the limit of its cache.
  std::chrono::milliseconds grammar_timeout{20'000};
  std::chrono::milliseconds release_timeout{5'000};
  // Longest wait for a prefill worker to confirm that nothing more is written to a ticket that was given up: a slice's
  // time, and that of the flush.
  std::chrono::milliseconds revoke_timeout{30'000};
  // Applies if the client gives none, and limits the client's.
  std::chrono::milliseconds request_timeout{600'000};
  // How long a decode worker keeps pages for a prompt that does not arrive: ticket_ttl plus ticket_ttl_per_expected
  // times the time that placement expects. A long queue must not cost a request its pages. The worker has an upper
  // limit of its own.
  std::chrono::milliseconds ticket_ttl{60'000};
  double ticket_ttl_per_expected = 4;
};

// Thread-safe. Must outlive its generations: call Drain or CancelAll before destruction, then stop the io_context.
class Dispatcher {
 public:
  Dispatcher(boost::asio::io_context& io, DispatchOptions options, const ServedModel& model,
             const NamespaceKeys& namespace_keys, Metrics& metrics, const Tracer& tracer);

  void Start();
  // Refuses new requests and waits for the running ones; cancels the rest at `deadline`. Blocks.
  void Drain(std::chrono::steady_clock::time_point deadline);
  // Cancels the remaining requests and waits until no call to a worker is open: gRPC's threads run nothing for us
  // afterwards.
  void Stop();

  // Sets the request's place in a trace: that of the client's traceparent, or a new trace.
  void BeginTrace(GenerationRequest& request, std::string_view traceparent, std::string_view tracestate) const;
  // Counts a request against its caller's limits, before any of it is parsed. ResourceExhausted: see RateLimits.
  absl::StatusOr<RateLimits::Lease> Admit(const Caller& caller);
  // InvalidArgument: more than four contexts' tokens, the limit for counting and detokenizing.
  absl::Status CheckCounted(size_t num_tokens, const std::string& param) const;

  // Makes a generation, which holds `lease` while it lives; call its Start to run it. Clamps the deadline; draws
  // request id and seed and begins a trace if they are unset.
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
  QualityRecords& quality_records() { return quality_records_; }
  DecodeSessions& decode_sessions() { return decode_sessions_; }
  LivePlanner& planner() { return planner_; }
  RateLimits& limits() { return *limits_; }
  const ForeignLoad& foreign_load() const { return foreign_load_; }
  RequestLog& requests() { return requests_; }
  const Placement& placement() const { return placement_; }
  LoadTracker& loads() { return *loads_; }
  // Tokens that each of these workers would not have to compute. Combines the worker's own report (leading chunks and
  // segments) with prompts just sent there; for workers that do not report, and for the store, uses this router's
  // guess.
  std::vector<PredictedReuse> PredictReuse(const PromptKeys& keys, std::span<const PrefixIndex::Holder> holders);
  // Records that the prompt was sent there (PrefixIndex::Insert).
  void NoteSent(const PromptKeys& keys, const PrefixIndex::Holder& holder, uint32_t exact_tokens);
  CircuitBreakers& breakers() { return breakers_; }
  grammar::GrammarCache& grammars() { return grammars_; }  // over the tokenizer's vocabulary
  RetryBudget& retry_budget() { return retry_budget_; }
  RouterMetrics& metrics() { return metrics_; }
  const Tracer& tracer() const { return tracer_; }

  // Longest context that is served: from the workers, otherwise from the model folder.
  uint32_t max_context() const;
  // True if a request would be accepted: the fleet serves and the router is not draining.
  bool ready() const { return !admission_.closed() && fleet_->snapshot()->Serves(); }
  size_t num_active() const;
  // Cancels the running requests with this id (clients may use one twice) and returns their number.
  size_t Cancel(const std::string& request_id, const absl::Status& reason);

 private:
  friend class Generation;
  // The request's work is over, but its result has not been delivered yet …
  void OnFinished(uint64_t id);
  // … and now it has: Drain no longer waits for it.
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
  QualityRecords quality_records_;
  DecodeSessions decode_sessions_;
  ForeignLoad foreign_load_;
  const std::shared_ptr<RateLimits> limits_ = std::make_shared<RateLimits>();
  LivePlanner planner_;
  RequestLog requests_;
  CircuitBreakers breakers_;
  RetryBudget retry_budget_;
  grammar::GrammarCache grammars_;
  Admission admission_;
  mutable std::mutex mutex_;  // guards the two below
  std::condition_variable idle_;
  uint64_t next_id_ = 1;
  std::map<uint64_t, std::weak_ptr<Generation>> active_;
};

}  // namespace spl::router
