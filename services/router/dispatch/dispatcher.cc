#include "services/router/dispatch/dispatcher.h"

#include <algorithm>
#include <random>
#include <utility>

#include "services/base/ids.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/router/dispatch/generation.h"
#include "services/router/dispatch/request_grammar.h"
#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

// 53 bits, so that a JSON reader that holds numbers as doubles can send the seed back unchanged.
uint64_t DrawSeed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32 | device()) >> 11;
}

FleetOptions WithCaches(FleetOptions options, std::shared_ptr<CacheView> caches) {
  options.caches = std::move(caches);
  return options;
}

}  // namespace

Dispatcher::Dispatcher(boost::asio::io_context& io, DispatchOptions options, const ServedModel& model,
                       const NamespaceKeys& namespace_keys, Metrics& metrics, const Tracer& tracer)
    : io_(io),
      options_(std::move(options)),
      model_(model),
      namespace_keys_(namespace_keys),
      metrics_(metrics),
      tracer_(tracer),
      caches_(std::make_shared<CacheView>(options_.cache_view, metrics)),
      fleet_(Fleet::Create(io, WithCaches(options_.fleet, caches_), calls_, metrics)),
      placement_(options_.placement),
      prefix_index_(options_.prefix_index),
      recent_index_({.capacity = options_.prefix_index.capacity, .ttl = options_.guess_ttl}),
      planner_(options_.planner, options_.plan_interval, metrics),
      breakers_(options_.breaker, metrics),
      retry_budget_(options_.retry_budget),
      grammars_(CompilerOf(model), {.deadline = options_.grammar_timeout}),
      admission_(options_.admission, metrics) {}

void Dispatcher::Start() {
  fleet_->Start({.on_lost =
                     [this](const std::string& worker_id) {
                       breakers_.Forget(worker_id);
                       for (const auto& generation : Active()) generation->OnWorkerLost(worker_id);
                     },
                 .on_refresh =
                     [this] {
                       foreign_load_.Update(fleet_->snapshot(), *loads_);
                       planner_.Tick(*fleet_->snapshot(), *loads_, admission_.num_waiting(),
                                     std::chrono::steady_clock::now());
                       admission_.OnRoom();
                     }});
}

void Dispatcher::Drain(std::chrono::steady_clock::time_point deadline) {
  admission_.Close();
  std::unique_lock lock(mutex_);
  if (idle_.wait_until(lock, deadline, [&] { return active_.empty(); })) return;
  lock.unlock();
  for (const auto& generation : Active()) {
    generation->Cancel(Errorf(absl::StatusCode::kUnavailable, "the router is shutting down"));
  }
  // Cancelling is posted work; give it the time that freeing pages takes.
  lock.lock();
  idle_.wait_for(lock, std::chrono::seconds(1), [&] { return active_.empty(); });
}

void Dispatcher::Stop() {
  Drain(std::chrono::steady_clock::now());
  grammars_.Stop();
  fleet_->Stop();
  if (!calls_->CancelAllAndWait(std::chrono::seconds(5))) log::Error("router.calls_left_open");
}

void Dispatcher::BeginTrace(GenerationRequest& request, std::string_view traceparent,
                            std::string_view tracestate) const {
  request.parent_trace = tracer_.Accept(traceparent, tracestate);
  request.trace = tracer_.MakeChild(request.parent_trace);
}

absl::StatusOr<RateLimits::Lease> Dispatcher::Admit(const Caller& caller) {
  absl::StatusOr<RateLimits::Lease> lease = limits_->Admit(caller, std::chrono::steady_clock::now());
  if (!lease.ok()) {
    metrics_.CountLimited();
    metrics_.CountError(lease.status().code());
  }
  return lease;
}

absl::Status Dispatcher::CheckCounted(size_t num_tokens, const std::string& param) const {
  constexpr size_t kContexts = 4;
  if (num_tokens <= kContexts * max_context()) return absl::OkStatus();
  return ParamError(param, "has {} tokens; the most is {}, four times the model's context", num_tokens,
                    kContexts * max_context());
}

std::shared_ptr<Generation> Dispatcher::Create(GenerationRequest request, std::shared_ptr<GenerationSink> sink,
                                               RateLimits::Lease lease) {
  if (!request.trace.valid()) BeginTrace(request, "", "");
  if (request.request_id.empty()) request.request_id = RandomId::Make().ToHex();
  if (!request.sampling.seed.has_value()) request.sampling.seed = DrawSeed();
  request.deadline = std::min(request.deadline, std::chrono::steady_clock::now() + options_.request_timeout);
  retry_budget_.OnRequest(std::chrono::steady_clock::now());
  std::lock_guard lock(mutex_);
  const uint64_t id = next_id_++;
  auto generation = std::make_shared<Generation>(*this, id, std::move(request), std::move(sink), std::move(lease));
  active_.emplace(id, generation);
  return generation;
}

uint32_t Dispatcher::max_context() const {
  const std::shared_ptr<const FleetSnapshot> fleet = fleet_->snapshot();
  return fleet->model.known && fleet->model.max_context > 0 ? fleet->model.max_context : model_.max_context();
}

size_t Dispatcher::Cancel(const std::string& request_id, const absl::Status& reason) {
  size_t cancelled = 0;
  for (const auto& generation : Active()) {
    if (generation->request_id() != request_id) continue;
    generation->Cancel(reason);
    ++cancelled;
  }
  return cancelled;
}

size_t Dispatcher::num_active() const {
  std::lock_guard lock(mutex_);
  return active_.size();
}

std::vector<PredictedReuse> Dispatcher::PredictReuse(const PromptKeys& keys,
                                                     std::span<const PrefixIndex::Holder> holders) {
  const auto now = std::chrono::steady_clock::now();
  const std::vector<size_t> recent = recent_index_.CountLeading(keys.prefix, holders, now);
  const auto recent_segments = recent_index_.HoldsSegments(keys.segments, holders, now);
  std::vector<KnownCache> known(holders.size());
  for (size_t i = 0; i < holders.size(); ++i) {
    size_t leading = 0;
    if (caches_->CountLeading(holders[i].worker_id, holders[i].epoch, keys.prefix, &leading))
      known[i].leading = std::max(leading, recent[i]);
    std::vector<uint32_t> tokens;
    if (!caches_->CountSegments(holders[i].worker_id, holders[i].epoch, keys.segments, &tokens)) continue;
    for (size_t s = 0; s < tokens.size(); ++s) {
      if (recent_segments[i][s] != 0) tokens[s] = keys.segments[s].end - keys.segments[s].begin;
    }
    known[i].segments = std::move(tokens);
  }
  return prefix_index_.Predict(keys, holders, now, known);
}

void Dispatcher::NoteSent(const PromptKeys& keys, const PrefixIndex::Holder& holder, uint32_t exact_tokens) {
  const auto now = std::chrono::steady_clock::now();
  prefix_index_.Insert(keys, holder, exact_tokens, now);
  recent_index_.Insert(keys, holder, exact_tokens, now);
}

void Dispatcher::OnFinished(uint64_t id) { admission_.Leave(id); }

void Dispatcher::OnDelivered(uint64_t id) {
  std::lock_guard lock(mutex_);
  active_.erase(id);
  if (active_.empty()) idle_.notify_all();
}

std::vector<std::shared_ptr<Generation>> Dispatcher::Active() const {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Generation>> active;
  for (const auto& [id, weak] : active_) {
    if (auto generation = weak.lock()) active.push_back(std::move(generation));
  }
  return active;
}

}  // namespace spl::router
