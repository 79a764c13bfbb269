#include "services/router/policies/placement.h"

#include <algorithm>
#include <unordered_map>

#include "services/base/status.h"
#include "services/router/policies/filters.h"
#include "services/router/policies/picker.h"

namespace spl::router {
namespace {

// Seconds of a token that has no KV in the worker's pages; fetching is no reason to go anywhere.
class LocalPrefixScorer final : public Scorer {
 public:
  CostSide side() const override { return CostSide::kPrefill; }
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override {
    if (query.reuse.empty()) return query.prompt_tokens;
    const PredictedReuse& reuse = query.reuse[candidate.prefill_idx];
    return query.prompt_tokens - std::min(query.prompt_tokens, reuse.prefix_tokens);
  }
};

bool Connected(const PrefillView& prefill, const DecodeView& decode, const PeerLink** link) {
  const auto it = prefill.peers.find(decode.worker_id);
  if (it == prefill.peers.end() || it->second.decode_epoch != decode.epoch) return false;
  *link = &it->second;
  return true;
}

Candidate Join(const Candidate& prefill, const Candidate& decode, const PeerLink* link) {
  Candidate pair = prefill;
  pair.decode = decode.decode;
  pair.link = link;
  pair.cost_s += decode.cost_s;
  return pair;
}

void KeepCheapest(std::vector<Candidate>* candidates, size_t count) {
  if (candidates->size() <= count) return;
  std::nth_element(candidates->begin(), candidates->begin() + static_cast<ptrdiff_t>(count), candidates->end(),
                   [](const Candidate& a, const Candidate& b) { return a.cost_s < b.cost_s; });
  candidates->resize(count);
}

// Adds the terms of what is not spent at the prefill worker.
void AddLaterTerms(const ScorerOptions& options, std::vector<std::unique_ptr<Scorer>>* terms) {
  terms->push_back(std::make_unique<WireScorer>(options));
  terms->push_back(std::make_unique<SlowdownScorer>(options));
  terms->push_back(std::make_unique<PressureScorer>(options));
}

template <typename Keep>
void Apply(bool advisory, std::vector<Candidate>* candidates, Keep keep) {
  if (advisory && std::none_of(candidates->begin(), candidates->end(), keep)) return;
  std::erase_if(*candidates, [&](const Candidate& c) { return !keep(c); });
}

// Whether a worker of each side keeps to grammars, whatever else it lacks.
bool AnyKeepsToGrammars(const FleetSnapshot& fleet) {
  const auto keeps = [](const auto& worker) { return worker.structured_output; };
  const bool prefill = std::any_of(fleet.prefill.begin(), fleet.prefill.end(), keeps) ||
                       std::any_of(fleet.local.begin(), fleet.local.end(), keeps);
  return prefill && std::any_of(fleet.decode.begin(), fleet.decode.end(), keeps);
}

}  // namespace

absl::StatusOr<PlacementPolicy> ParsePlacementPolicy(std::string_view name) {
  if (name == "splice") return PlacementPolicy::kSplice;
  if (name == "round-robin") return PlacementPolicy::kRoundRobin;
  if (name == "least-loaded") return PlacementPolicy::kLeastLoaded;
  if (name == "prefix-only") return PlacementPolicy::kPrefixOnly;
  return InvalidArgument("placement policy \"{}\" is none of splice, round-robin, least-loaded, prefix-only", name);
}

Placement::Placement(const PlacementOptions& options)
    : policy_(options.policy),
      scorer_options_(options.scorer),
      queue_(std::make_unique<QueueScorer>(options.scorer)),
      picker_(std::make_unique<SoftmaxPicker>(options.temperature)),
      random_(options.seed != 0 ? options.seed : std::random_device()()) {
  filters_.push_back(std::make_unique<NotDrainingFilter>());
  filters_.push_back(std::make_unique<FitsFilter>());
  filters_.push_back(std::make_unique<KeepsToGrammarFilter>());
  // before the advisory filters: a worker that cannot serve is no fallback
  filters_.push_back(std::make_unique<ShortEnoughFilter>());
  filters_.push_back(std::make_unique<NotLeavingFilter>());
  filters_.push_back(std::make_unique<NotFailedFilter>());
  room_filters_.push_back(std::make_unique<NotFullFilter>());
  room_filters_.push_back(std::make_unique<RoomToGrowFilter>(options.max_decode_load));
  ScorerOptions own = options.scorer;
  own.slowdown_share = 0;  // others wait, not this request
  AddLaterTerms(own, &expected_);
  switch (policy_) {
    case PlacementPolicy::kSplice:
      scorers_.push_back(std::make_unique<ComputeScorer>(options.scorer));
      scorers_.push_back(std::make_unique<FetchScorer>(options.scorer));
      AddLaterTerms(options.scorer, &scorers_);
      break;
    case PlacementPolicy::kLeastLoaded:
      scorers_.push_back(std::make_unique<PressureScorer>(options.scorer));
      break;
    case PlacementPolicy::kPrefixOnly:
      scorers_.push_back(std::make_unique<LocalPrefixScorer>());
      scorers_.push_back(std::make_unique<PressureScorer>(options.scorer));
      break;
    case PlacementPolicy::kRoundRobin:
      break;
  }
}

Placement::Sides Placement::KeepWorkers(const PlacementQuery& query, bool with_advice, bool with_room) const {
  Sides sides;
  sides.prefill.reserve(query.fleet.prefill.size());
  sides.decode.reserve(query.fleet.decode.size());
  for (size_t i = 0; i < query.fleet.prefill.size(); ++i) {
    sides.prefill.push_back({.prefill_idx = i, .prefill = &query.fleet.prefill[i]});
  }
  // The other policies know only prefill workers.
  for (size_t i = query.fleet.prefill.size(); i < query.fleet.num_places() && policy_ == PlacementPolicy::kSplice;
       ++i) {
    sides.prefill.push_back({.prefill_idx = i, .prefill = &query.fleet.place(i)});
  }
  for (const DecodeView& decode : query.fleet.decode) sides.decode.push_back({.decode = &decode});
  const auto apply = [&](const Filter& filter) {
    Apply(filter.advisory(), &sides.prefill,
          [&](const Candidate& c) { return filter.KeepPrefill(query, *c.prefill, c.prefill_idx); });
    Apply(filter.advisory(), &sides.decode, [&](const Candidate& c) { return filter.KeepDecode(query, *c.decode); });
  };
  for (const auto& filter : filters_) {
    if (with_advice || !filter->advisory()) apply(*filter);
  }
  if (with_room) {
    for (const auto& filter : room_filters_) apply(*filter);
  }
  const auto local = std::stable_partition(sides.prefill.begin(), sides.prefill.end(),
                                           [](const Candidate& c) { return !c.prefill->local.has_value(); });
  sides.local.assign(local, sides.prefill.end());
  sides.prefill.erase(local, sides.prefill.end());
  return sides;
}

void Placement::ScoreSides(const PlacementQuery& query, Sides* sides) const {
  double total_s = 0;
  for (Candidate& c : sides->prefill) {
    c.queue_s = queue_->Seconds(query, c);
    total_s += c.queue_s;
  }
  const double mean_s = sides->prefill.empty() ? 0 : total_s / static_cast<double>(sides->prefill.size());
  const bool counts_queue = policy_ == PlacementPolicy::kSplice || policy_ == PlacementPolicy::kLeastLoaded;
  for (Candidate& c : sides->local) c.queue_s = queue_->Seconds(query, c);
  for (std::vector<Candidate>* const places : {&sides->prefill, &sides->local}) {
    for (Candidate& c : *places) {
      c.excess_queue_s = std::max(0.0, c.queue_s - mean_s);
      if (counts_queue) c.cost_s = c.queue_s;
    }
  }
  for (const auto& scorer : scorers_) {
    if (scorer->side() == CostSide::kPrefill) {
      for (Candidate& c : sides->prefill) c.cost_s += scorer->Seconds(query, c);
      for (Candidate& c : sides->local) c.cost_s += scorer->Seconds(query, c);
    } else if (scorer->side() == CostSide::kDecode) {
      for (Candidate& c : sides->decode) c.cost_s += scorer->Seconds(query, c);
    }
  }
}

std::vector<Candidate> Placement::Pairs(const PlacementQuery& query, Sides sides) const {
  const bool many = sides.prefill.size() * sides.decode.size() > kMaxPairs;
  std::vector<Candidate> pairs;
  const PeerLink* link = nullptr;
  if (!many) {
    for (const Candidate& p : sides.prefill) {
      for (const Candidate& d : sides.decode) {
        if (Connected(*p.prefill, *d.decode, &link)) pairs.push_back(Join(p, d, link));
      }
    }
  } else {
    // Equals come in random order, so that it is not always the same ones that are cut off.
    {
      std::lock_guard lock(mutex_);
      std::shuffle(sides.prefill.begin(), sides.prefill.end(), random_);
      std::shuffle(sides.decode.begin(), sides.decode.end(), random_);
    }
    const auto cheaper = [](const Candidate& a, const Candidate& b) { return a.cost_s < b.cost_s; };
    std::stable_sort(sides.prefill.begin(), sides.prefill.end(), cheaper);
    std::stable_sort(sides.decode.begin(), sides.decode.end(), cheaper);
    std::unordered_map<std::string_view, const Candidate*> by_id;
    size_t used = 0;
    for (const Candidate& p : sides.prefill) {
      std::vector<Candidate> own;
      if (4 * p.prefill->peers.size() < sides.decode.size()) {
        if (by_id.empty()) {
          by_id.reserve(sides.decode.size());
          for (const Candidate& d : sides.decode) by_id.emplace(d.decode->worker_id, &d);
        }
        for (const auto& [id, peer] : p.prefill->peers) {
          const auto d = by_id.find(id);
          if (d != by_id.end() && d->second->decode->epoch == peer.decode_epoch)
            own.push_back(Join(p, *d->second, &peer));
        }
        KeepCheapest(&own, kShortlist);
      } else {
        for (const Candidate& d : sides.decode) {
          if (Connected(*p.prefill, *d.decode, &link)) own.push_back(Join(p, d, link));
          if (own.size() == kShortlist) break;
        }
      }
      pairs.insert(pairs.end(), own.begin(), own.end());
      if (!own.empty() && ++used == kShortlist) break;
    }
  }
  JoinLocal(sides, &pairs);
  for (const auto& scorer : scorers_) {
    if (scorer->side() != CostSide::kPair) continue;
    for (Candidate& pair : pairs) pair.cost_s += scorer->Seconds(query, pair);
  }
  return pairs;
}

// Each decode worker that prefills with itself.
void Placement::JoinLocal(const Sides& sides, std::vector<Candidate>* pairs) {
  if (sides.local.empty()) return;
  std::unordered_map<std::string_view, const Candidate*> by_id;
  by_id.reserve(sides.decode.size());
  for (const Candidate& d : sides.decode) by_id.emplace(d.decode->worker_id, &d);
  const PeerLink* link = nullptr;
  for (const Candidate& p : sides.local) {
    const auto d = by_id.find(p.prefill->local->decode_id);
    if (d != by_id.end() && Connected(*p.prefill, *d->second->decode, &link))
      pairs->push_back(Join(p, *d->second, link));
  }
}

// The worker whose turn it is costs nothing, each later one a second more.
void Placement::TakeTurn(Sides* sides) const {
  std::lock_guard lock(mutex_);
  const uint64_t turn = turn_++;
  const auto number = [&](std::vector<Candidate>& side) {
    for (size_t i = 0; i < side.size(); ++i) {
      side[i].cost_s = static_cast<double>((i + side.size() - turn % side.size()) % side.size());
    }
  };
  number(sides->prefill);
  number(sides->decode);
}

absl::Status Placement::NobodyFor(const PlacementQuery& query, const Sides& left) {
  const bool both = !query.fleet.decode.empty() && query.fleet.num_places() > 0;
  if (query.structured_output && both && !AnyKeepsToGrammars(query.fleet))
    return absl::UnimplementedError(
        "no worker of this cluster serves structured output: they need libsplice_xgrammar.so beside the program and a "
        "model folder with a tokenizer");
  const auto answering = [&] {
    return fmt::format("({} prefill and {} decode workers answer)", query.fleet.prefill.size(),
                       query.fleet.decode.size());
  };
  if (left.decode.empty())
    return Errorf(absl::StatusCode::kUnavailable, "no decode worker can take the request {}", answering());
  if (left.prefill.empty() && left.local.empty())
    return Errorf(absl::StatusCode::kUnavailable, "no prefill worker can take the request {}", answering());
  return Errorf(absl::StatusCode::kUnavailable,
                "no prefill worker is connected to a decode worker that can take the request {}", answering());
}

absl::StatusOr<Candidate> Placement::Place(const PlacementQuery& query) const {
  const auto pairs_of = [&](bool with_advice, bool with_room) {
    Sides sides = KeepWorkers(query, with_advice, with_room);
    ScoreSides(query, &sides);
    if (policy_ == PlacementPolicy::kRoundRobin) TakeTurn(&sides);
    return Pairs(query, std::move(sides));
  };
  std::vector<Candidate> candidates = pairs_of(true, true);
  // Advice taken on either side by itself can leave two sides that are not connected.
  if (candidates.empty()) candidates = pairs_of(false, true);
  if (candidates.empty()) {
    if (!pairs_of(false, false).empty()) {
      return Errorf(absl::StatusCode::kResourceExhausted, "every decode worker is full");
    }
    return NobodyFor(query, KeepWorkers(query, false, false));
  }
  const size_t picked = [&] {
    std::lock_guard lock(mutex_);
    return picker_->Pick(candidates, random_);
  }();
  Candidate chosen = candidates[picked];
  chosen.prefill_s = PrefillSeconds(scorer_options_, query, chosen);
  chosen.expected_s = chosen.queue_s + chosen.prefill_s;
  for (const auto& term : expected_) chosen.expected_s += term->Seconds(query, chosen);
  return chosen;
}

absl::StatusOr<PlacedRequest> PlaceRequest(const Placement& placement, const PlacementQuery& query) {
  SPLICE_ASSIGN_OR_RETURN(const Candidate pair, placement.Place(query));
  return PlacedRequest{
      .pair = pair,
      .exact_tokens = query.reuse.empty() ? 0 : query.reuse[pair.prefill_idx].exact_tokens,
      .tokens_to_compute = static_cast<uint64_t>(ComputeScorer::TokensToCompute(query, pair.prefill_idx))};
}

PlacedLoad Charge(LoadTracker& loads, const PlacementQuery& query, const PlacedRequest& placed, uint32_t sequences) {
  return {.prefill = loads.Add(placed.pair.prefill->worker_id,
                               {.prefill_tokens = placed.tokens_to_compute, .prefill_s = placed.pair.prefill_s}),
          .decode = loads.Add(placed.pair.decode->worker_id,
                              {.prefill_tokens = query.prompt_tokens, .sequences = sequences})};
}

}  // namespace spl::router
