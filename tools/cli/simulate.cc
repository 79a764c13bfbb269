#include "tools/cli/simulate.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <set>

#include "services/base/check.h"
#include "services/base/metrics.h"
#include "services/base/status.h"
#include "services/router/admission/admission.h"

namespace spl::cli {
namespace {

using router::Candidate;
using router::PrefixIndex;
using Clock = std::chrono::steady_clock;

chunk::ChunkKey KeyOf(uint64_t kind, uint64_t id, uint64_t part) {
  chunk::ChunkKey key;
  uint64_t x = id * 0x9E3779B97F4A7C15ull + part * 0xC2B2AE3D27D4EB4Full + kind;
  for (size_t i = 0; i < key.bytes.size(); i += 8) {
    x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9ull + 0x94D049BB133111EBull;
    for (size_t b = 0; b < 8; ++b) key.bytes[i + b] = static_cast<uint8_t>(x >> (8 * b));
  }
  return key;
}

router::PromptKeys KeysOf(const SimRequest& request, uint64_t number) {
  constexpr uint32_t kChunksPerId = 512 / chunk::kChunkTokens;
  router::PromptKeys keys;
  for (uint32_t i = 0; (i + 1) * chunk::kChunkTokens <= request.input_tokens; ++i) {
    const uint32_t block = i / kChunksPerId;
    keys.prefix.push_back(block < request.hash_ids.size() ? KeyOf(1, request.hash_ids[block], i % kChunksPerId)
                                                          : KeyOf(2, number, i));
  }
  for (const SimSegment& s : request.segments) {
    keys.segments.push_back({.key = KeyOf(3, s.id, s.end - s.begin), .begin = s.begin, .end = s.end});
  }
  return keys;
}

enum class Life { kOff, kStarting, kServing, kLeaving };

class Simulation {
 public:
  Simulation(const std::vector<SimRequest>& trace, const SimOptions& options)
      : trace_(trace),
        options_(options),
        placement_(options.placement),
        index_({.epoch = Clock::time_point()}),
        admission_({.max_running = trace.size() + 1, .max_queue = options.max_queue, .now = [this] { return Now(); }},
                   metrics_),
        store_(options.model.fetch_bytes_per_s > 0 ? std::make_unique<SimCache>(1ull << 40) : nullptr) {
    if (options.scaling.has_value()) {
      router::PlannerOptions planner = options.scaling->planner;
      planner.drain = true;
      planner_.emplace(planner);
    }
  }

  SimReport Run() {
    const bool scales = planner_.has_value();
    const auto slots = [&](uint32_t count, const router::PoolLimits& limits) {
      return scales ? std::max(count, limits.max_replicas) : count;
    };
    const router::PlannerOptions limits = scales ? options_.scaling->planner : router::PlannerOptions();
    for (uint32_t i = 0; i < slots(options_.prefill_workers, limits.prefill); ++i) {
      prefill_.push_back({.worker = std::make_unique<SimPrefill>(options_.model),
                          .life = i < options_.prefill_workers ? Life::kServing : Life::kOff});
    }
    for (uint32_t i = 0; i < slots(options_.decode_workers, limits.decode); ++i) {
      decode_.push_back({.worker = std::make_unique<SimDecode>(options_.model),
                         .life = i < options_.decode_workers ? Life::kServing : Life::kOff});
    }
    flights_.resize(trace_.size());
    Rebuild();
    At(0, [this] { Poll(); });
    if (scales) At(options_.scaling->interval_s, [this] { Scale(); });
    for (size_t i = 0; i < trace_.size(); ++i) {
      // Arrivals enter the event queue one at a time, which keeps it small.
      if (i == 0) ScheduleArrival(0);
    }
    while (!events_.empty() && finished_ < trace_.size()) {
      Event event = events_.top();
      events_.pop();
      now_s_ = event.at_s;
      event.run();
    }
    return Report();
  }

 private:
  struct Event {
    double at_s;
    uint64_t sequence;
    std::function<void()> run;
    bool operator<(const Event& other) const {
      return at_s != other.at_s ? at_s > other.at_s : sequence > other.sequence;
    }
  };
  struct Prefill {
    std::unique_ptr<SimPrefill> worker;
    std::deque<uint64_t> queue;
    bool busy = false;
    Life life = Life::kOff;
    uint64_t epoch = 1;
  };
  struct Decode {
    std::unique_ptr<SimDecode> worker;
    Life life = Life::kOff;
    uint64_t epoch = 1;
  };
  struct Flight {
    router::PromptKeys keys;
    size_t prefill = 0, decode = 0;
    uint64_t queued_tokens = 0;
    std::set<std::string> full;
    router::PlacedLoad load;
    double link_bytes_per_s = 0;
    double first_token_s = 0;
  };

  Clock::time_point Now() const {
    return start_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(now_s_));
  }
  void At(double at_s, std::function<void()> run) { events_.push({at_s, next_event_++, std::move(run)}); }

  void ScheduleArrival(size_t i) {
    if (i >= trace_.size()) return;
    At(trace_[i].at_s, [this, i] {
      ScheduleArrival(i + 1);
      ++arrived_;
      flights_[i].keys = KeysOf(trace_[i], i);
      if (!admission_.Enter(Queued(i)).ok()) Refuse(i);
    });
  }

  router::QueuedRequest Queued(size_t i) {
    return {.id = i,
            .tenant = trace_[i].tenant,
            .priority = trace_[i].priority,
            .tokens = trace_[i].input_tokens,
            .start = [this, i] { At(now_s_, [this, i] { Dispatch(i); }); },
            .refuse = [this, i](const absl::Status&) { At(now_s_, [this, i] { Refuse(i); }); }};
  }

  void Refuse(size_t i) {
    ++refused_;
    ++finished_;
    admission_.Leave(i);
    flights_[i] = {};
  }

  // Generation::Dispatch without its calls.
  void Dispatch(size_t i) {
    Flight& flight = flights_[i];
    const SimRequest& request = trace_[i];
    while (true) {
      const auto began = Clock::now();
      const std::vector<router::PredictedReuse> reuse = index_.Predict(flight.keys, holders_, Now());
      const router::PlacementQuery query{.fleet = fleet_,
                                         .loads = *loads_,
                                         .prompt_tokens = request.input_tokens,
                                         .total_tokens = request.input_tokens + 1,
                                         .reuse = reuse,
                                         .foreign_tokens = foreign_,
                                         .wire_share = options_.model.wire_share,
                                         .aligned_cost = options_.model.aligned_cost,
                                         .fetch_bytes_per_s = options_.model.fetch_bytes_per_s,
                                         .full = &flight.full};
      const absl::StatusOr<router::PlacedRequest> placed = router::PlaceRequest(placement_, query);
      if (!placed.ok()) {
        flight.full.clear();
        if (placed.status().code() != absl::StatusCode::kResourceExhausted || !admission_.WaitForRoom(Queued(i)).ok()) {
          Refuse(i);
        }
        return;
      }
      const Candidate& pair = placed->pair;
      index_.Insert(flight.keys, holders_[pair.prefill_idx], placed->exact_tokens, Now());
      decisions_us_.push_back(std::chrono::duration<double, std::micro>(Clock::now() - began).count());
      flight.prefill = prefill_slots_[pair.prefill_idx];
      flight.decode = decode_slots_[static_cast<size_t>(pair.decode - fleet_.decode.data())];
      Decode& decode = decode_[flight.decode];
      Advance(flight.decode);
      if (!decode.worker->HasRoom(request.input_tokens + request.output_tokens)) {
        flight.full.insert(pair.decode->worker_id);
        continue;
      }
      decode.worker->Reserve(request.input_tokens + request.output_tokens);
      const uint64_t tokens = placed->tokens_to_compute;
      flight.load = router::Charge(*loads_, query, *placed, 1);
      flight.link_bytes_per_s = pair.link->bytes_per_s;
      flight.queued_tokens = tokens;
      placed_tokens_ += static_cast<double>(tokens);
      admission_.Reserved(i);
      prefill_[flight.prefill].worker->queued_tokens += tokens;
      prefill_[flight.prefill].queue.push_back(i);
      StartPrefill(flight.prefill);
      return;
    }
  }

  void StartPrefill(size_t p) {
    Prefill& prefill = prefill_[p];
    if (prefill.busy || prefill.queue.empty()) return;
    const uint64_t i = prefill.queue.front();
    prefill.queue.pop_front();
    prefill.busy = true;
    const SimRequest& request = trace_[i];
    const SimReuse reuse = prefill.worker->Look(flights_[i].keys, request.input_tokens, store_.get());
    const double seconds = prefill.worker->Seconds(reuse, request.input_tokens);
    At(now_s_ + seconds, [this, p, i, reuse, seconds] { OnPrefilled(p, i, reuse, seconds); });
  }

  void OnPrefilled(size_t p, uint64_t i, const SimReuse& reuse, double seconds) {
    Prefill& prefill = prefill_[p];
    Flight& flight = flights_[i];
    const SimRequest& request = trace_[i];
    prefill.busy = false;
    SimPrefill& worker = *prefill.worker;
    worker.busy_s += seconds;
    ++worker.requests;
    worker.queued_tokens -= flight.queued_tokens;
    if (reuse.computed >= 512) {
      const double rate = (reuse.computed + options_.model.aligned_cost * reuse.aligned) / seconds;
      worker.tokens_per_s = worker.tokens_per_s == 0 ? rate : 0.9 * worker.tokens_per_s + 0.1 * rate;
    }
    worker.Keep(flight.keys, request.input_tokens, reuse, store_.get());
    if (store_ != nullptr) {
      index_.InsertStored(flight.keys, reuse.aligned == 0 ? UINT32_MAX : reuse.prefix, Now());
    }
    prompt_tokens_ += request.input_tokens;
    saved_tokens_ += reuse.prefix + (1 - options_.model.aligned_cost) * reuse.aligned;
    flight.load.prefill.Reset();
    flight.first_token_s = now_s_;
    const double ttft_ms = 1e3 * (now_s_ - request.at_s);
    ttft_ms_.push_back(ttft_ms);
    window_ttft_ms_.push_back(ttft_ms);
    const double wire_s = static_cast<double>(options_.model.kv_bytes_per_token) * request.input_tokens *
                          options_.model.wire_share / flight.link_bytes_per_s * (1 - options_.model.wire_overlap);
    At(now_s_ + wire_s, [this, i] {
      Advance(flights_[i].decode);
      decode_[flights_[i].decode].worker->Join(now_s_, i, trace_[i].input_tokens, trace_[i].output_tokens);
      ScheduleEnd(flights_[i].decode);
    });
    StartPrefill(p);
  }

  void ScheduleEnd(size_t d) {
    SimDecode& worker = *decode_[d].worker;
    const std::optional<double> end = worker.NextEnd();
    if (!end.has_value()) return;
    At(std::max(*end, now_s_), [this, d, version = worker.version] {
      if (decode_[d].worker->version == version) Advance(d);
    });
  }

  void Advance(size_t d) {
    SimDecode& worker = *decode_[d].worker;
    const std::vector<uint64_t> ended = worker.Advance(now_s_);
    for (const uint64_t i : ended) {
      const SimRequest& request = trace_[i];
      worker.Release(request.input_tokens + request.output_tokens);
      const double tpot_ms = 1e3 * (now_s_ - flights_[i].first_token_s) / request.output_tokens;
      tpot_ms_.push_back(tpot_ms);
      window_tpot_ms_.push_back(tpot_ms);
      flights_[i] = {};
      ++finished_;
      admission_.Leave(i);
    }
    if (!ended.empty()) ScheduleEnd(d);
  }

  // ---- the fleet, as the router's polls see it

  void Rebuild() {
    fleet_ = {};
    holders_.clear();
    prefill_slots_.clear();
    decode_slots_.clear();
    for (size_t d = 0; d < decode_.size(); ++d) {
      if (decode_[d].life != Life::kServing && decode_[d].life != Life::kLeaving) continue;
      decode_slots_.push_back(d);
      fleet_.decode.push_back({.worker_id = "decode-" + std::to_string(d),
                               .epoch = decode_[d].epoch,
                               .max_sequences = options_.model.max_sequences,
                               .total_pages = options_.model.decode_kv_tokens,
                               .max_sequence_tokens = options_.model.decode_kv_tokens,
                               .kv_bytes_per_token = options_.model.kv_bytes_per_token,
                               .draining = decode_[d].life == Life::kLeaving});
    }
    const size_t pod = options_.pod_size;
    const size_t pods = pod == 0 ? 1 : std::max<size_t>(1, decode_.size() / pod);
    for (size_t p = 0; p < prefill_.size(); ++p) {
      if (prefill_[p].life != Life::kServing && prefill_[p].life != Life::kLeaving) continue;
      prefill_slots_.push_back(p);
      router::PrefillView view{.worker_id = "prefill-" + std::to_string(p),
                               .epoch = prefill_[p].epoch,
                               .draining = prefill_[p].life == Life::kLeaving};
      for (size_t d = 0; d < decode_slots_.size(); ++d) {
        if (decode_slots_[d] % pods != p % pods) continue;
        view.peers[fleet_.decode[d].worker_id] = {.decode_epoch = fleet_.decode[d].epoch,
                                                  .bytes_per_s = options_.model.wire_bytes_per_s};
      }
      holders_.push_back({view.worker_id, view.epoch, true, options_.model.prefill_kv_tokens / chunk::kChunkTokens});
      fleet_.prefill.push_back(std::move(view));
    }
    Refresh();
  }

  void Refresh() {
    foreign_.clear();  // there is one router
    foreign_.resize(fleet_.prefill.size(), 0);
    for (size_t k = 0; k < fleet_.prefill.size(); ++k) {
      const SimPrefill& worker = *prefill_[prefill_slots_[k]].worker;
      worker.Report(&fleet_.prefill[k]);
    }
    for (size_t k = 0; k < fleet_.decode.size(); ++k) {
      Advance(decode_slots_[k]);
      const SimDecode& worker = *decode_[decode_slots_[k]].worker;
      router::DecodeView& view = fleet_.decode[k];
      view.sequences = worker.reserved_sequences;
      view.free_pages = view.total_pages - worker.reserved_tokens;
      view.step_seconds = worker.StepSeconds();
    }
  }

  void Poll() {
    Refresh();
    admission_.OnRoom();
    At(now_s_ + options_.poll_s, [this] { Poll(); });
  }

  // ---- scaling: acts on the planner's numbers like KEDA and a StatefulSet

  void Scale() {
    const SimScaling& scaling = *options_.scaling;
    Refresh();
    router::PlannerInput input{.now = Now(),
                               .interval_s = scaling.interval_s,
                               .tokens_to_compute = std::exchange(placed_tokens_, 0),
                               .ttft_p95_s = PercentilesOf(window_ttft_ms_).p95 / 1e3,
                               .tpot_p95_s = PercentilesOf(window_tpot_ms_).p95 / 1e3,
                               .waiting = admission_.num_waiting()};
    double rates = 0, loads = 0;
    for (size_t k = 0; k < fleet_.prefill.size(); ++k) {
      const Prefill& p = prefill_[prefill_slots_[k]];
      rates += fleet_.prefill[k].tokens_per_s;
      input.prefill.push_back({.worker_id = fleet_.prefill[k].worker_id,
                               .load = static_cast<double>(p.worker->queued_tokens),
                               .busy = p.busy || !p.queue.empty()});
    }
    for (size_t k = 0; k < fleet_.decode.size(); ++k) {
      const router::DecodeView& d = fleet_.decode[k];
      const double load = std::max(1 - static_cast<double>(d.free_pages) / static_cast<double>(d.total_pages),
                                   static_cast<double>(d.sequences) / d.max_sequences);
      loads += load;
      input.decode.push_back({.worker_id = d.worker_id, .load = load, .busy = d.sequences > 0});
    }
    input.worker_tokens_per_s = rates / static_cast<double>(fleet_.prefill.size());
    input.decode_load = loads / static_cast<double>(fleet_.decode.size());
    const auto plan = planner_->Plan(input);
    scale_.push_back({.at_s = now_s_,
                      .rate = static_cast<double>(std::exchange(arrived_, 0)) / scaling.interval_s,
                      .prefill = static_cast<uint32_t>(fleet_.prefill.size()),
                      .decode = static_cast<uint32_t>(fleet_.decode.size()),
                      .desired_prefill = plan.at(router::Pool::kPrefill).desired,
                      .desired_decode = plan.at(router::Pool::kDecode).desired,
                      .ttft_p95_s = input.ttft_p95_s,
                      .tpot_p95_s = input.tpot_p95_s});
    worker_s_ += scaling.interval_s * static_cast<double>(fleet_.prefill.size() + fleet_.decode.size());
    window_ttft_ms_.clear();
    window_tpot_ms_.clear();
    Apply(plan.at(router::Pool::kPrefill), "prefill-", prefill_, [](Prefill& p, const SimModel& model) {
      SPLICE_CHECK(!p.busy && p.queue.empty(), "a worker with prompts was taken away");
      p.worker = std::make_unique<SimPrefill>(model);
    });
    Apply(plan.at(router::Pool::kDecode), "decode-", decode_, [](Decode& d, const SimModel& model) {
      SPLICE_CHECK(d.worker->reserved_sequences == 0, "a worker with sequences was taken away");
      d.worker = std::make_unique<SimDecode>(model);
    });
    Rebuild();
    At(now_s_ + scaling.interval_s, [this] { Scale(); });
  }

  template <typename Slot, typename Reset>
  void Apply(const router::PoolPlan& plan, const std::string& name, std::vector<Slot>& slots, Reset reset) {
    for (size_t k = 0; k < slots.size(); ++k) {
      Slot& slot = slots[k];
      if (slot.life == Life::kServing || slot.life == Life::kLeaving) {
        const bool leaves =
            std::find(plan.leaving.begin(), plan.leaving.end(), name + std::to_string(k)) != plan.leaving.end();
        slot.life = leaves ? Life::kLeaving : Life::kServing;
      }
      if (k < plan.desired && slot.life == Life::kOff) {
        slot.life = Life::kStarting;
        ++slot.epoch;
        At(now_s_ + options_.scaling->start_s, [this, &slot] {
          if (slot.life != Life::kStarting) return;
          slot.life = Life::kServing;
          Rebuild();
        });
      }
      if (k >= plan.desired && slot.life == Life::kStarting) slot.life = Life::kOff;
      if (k >= plan.desired && slot.life == Life::kLeaving) {
        reset(slot, options_.model);
        slot.life = Life::kOff;
      }
    }
  }

  SimReport Report() {
    SimReport report{.policy = PolicyName(options_.placement.policy),
                     .requests = trace_.size(),
                     .refused = refused_,
                     .ttft_ms = PercentilesOf(ttft_ms_),
                     .tpot_ms = PercentilesOf(tpot_ms_),
                     .hit_rate = prompt_tokens_ > 0 ? saved_tokens_ / prompt_tokens_ : 0,
                     .duration_s = now_s_,
                     .worker_hours = worker_s_ / 3600,
                     .scale = std::move(scale_)};
    double most = 0, total = 0;
    for (const Prefill& p : prefill_) {
      most = std::max(most, p.worker->busy_s);
      total += p.worker->busy_s;
    }
    const double mean = total / static_cast<double>(prefill_.size());
    report.max_over_mean = mean > 0 ? most / mean : 0;
    report.utilization = now_s_ > 0 ? mean / now_s_ : 0;
    report.decision_us_p99 = PercentilesOf(decisions_us_).p99;
    if (options_.scaling.has_value()) {
      const double target_ms = 1e3 * options_.scaling->planner.ttft_target_s;
      const auto good = std::count_if(ttft_ms_.begin(), ttft_ms_.end(), [&](double ms) { return ms <= target_ms; });
      report.good_fraction = static_cast<double>(good) / static_cast<double>(trace_.size());
    }
    return report;
  }

  const std::vector<SimRequest>& trace_;
  const SimOptions& options_;
  const Clock::time_point start_{std::chrono::hours(1)};  // the clock's start: any, but the same in every run
  double now_s_ = 0;
  std::priority_queue<Event> events_;
  uint64_t next_event_ = 0;
  Metrics metrics_;
  const router::Placement placement_;
  PrefixIndex index_;
  router::Admission admission_;
  const std::shared_ptr<router::LoadTracker> loads_ = std::make_shared<router::LoadTracker>();
  const std::unique_ptr<SimCache> store_;
  std::optional<router::Planner> planner_;
  std::vector<Prefill> prefill_;
  std::vector<Decode> decode_;
  router::FleetSnapshot fleet_;
  std::vector<PrefixIndex::Holder> holders_;
  std::vector<size_t> prefill_slots_, decode_slots_;  // slots of the fleet's entries
  std::vector<uint64_t> foreign_;
  std::vector<Flight> flights_;
  size_t finished_ = 0, refused_ = 0, arrived_ = 0;
  double prompt_tokens_ = 0, saved_tokens_ = 0, placed_tokens_ = 0, worker_s_ = 0;
  std::vector<double> ttft_ms_, tpot_ms_, window_ttft_ms_, window_tpot_ms_, decisions_us_;
  std::vector<SimScalePoint> scale_;
};

}  // namespace

const char* PolicyName(router::PlacementPolicy policy) {
  switch (policy) {
    case router::PlacementPolicy::kSplice:
      return "splice";
    case router::PlacementPolicy::kRoundRobin:
      return "round-robin";
    case router::PlacementPolicy::kLeastLoaded:
      return "least-loaded";
    case router::PlacementPolicy::kPrefixOnly:
      return "prefix-only";
  }
  return "?";
}

absl::StatusOr<SimReport> Simulate(const std::vector<SimRequest>& trace, const SimOptions& options) {
  if (trace.empty() || options.prefill_workers == 0 || options.decode_workers == 0) {
    return InvalidArgument("a simulation needs a request, a prefill and a decode worker");
  }
  for (size_t i = 0; i < trace.size(); ++i) {
    if (trace[i].input_tokens + trace[i].output_tokens > options.model.decode_kv_tokens) {
      return InvalidArgument("request {} of the trace has {} tokens; a decode worker holds {}", i,
                             trace[i].input_tokens + trace[i].output_tokens, options.model.decode_kv_tokens);
    }
  }
  return Simulation(trace, options).Run();
}

}  // namespace spl::cli
