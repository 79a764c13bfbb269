// The placement profiles: their filters, cost terms and picker.
#pragma once

#include <memory>
#include <mutex>
#include <random>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/policies/policy.h"
#include "services/router/policies/scorers.h"

namespace spl::router {

enum class PlacementPolicy {
  kSplice,       // the whole cost
  kRoundRobin,   // one after the other on each side
  kLeastLoaded,  // queue and pressure
  kPrefixOnly,   // the longest prefix in a worker's pages; decode workers by pressure
};
// Takes "splice", "round-robin", "least-loaded" or "prefix-only". InvalidArgument lists them.
absl::StatusOr<PlacementPolicy> ParsePlacementPolicy(std::string_view name);

struct PlacementOptions {
  PlacementPolicy policy = PlacementPolicy::kSplice;
  ScorerOptions scorer;
  double temperature = 0;      // see SoftmaxPicker
  double max_decode_load = 1;  // see RoomToGrowFilter
  uint64_t seed = 0;           // for tie breaks; 0: from the system
};

// Pairs are connected prefill and decode workers. With the policy kSplice they also include every decode worker paired
// with itself, if it prefills prompts as short as this one.
//
// Thread-safe. Cost: workers × terms of their side, and pairs × terms of pairs, all in memory. In fleets with more than
// kMaxPairs connected pairs, only the kShortlist cheapest prefill workers are paired, each with the kShortlist
// cheapest of its decode workers: exact if all links are equal, nearly exact otherwise. All decode workers that prefill
// are considered.
class Placement {
 public:
  static constexpr size_t kMaxPairs = 1024;
  static constexpr size_t kShortlist = 16;

  explicit Placement(const PlacementOptions& options);

  // Returns the pair to use; it points into query.fleet. Unavailable: no connected pair, or none that fits.
  // ResourceExhausted: every pair was dropped for lack of room.
  absl::StatusOr<Candidate> Place(const PlacementQuery& query) const;

 private:
  struct Sides {
    std::vector<Candidate> prefill, decode;
    std::vector<Candidate> local;  // decode workers as places for this prompt, each paired with itself only
  };

  Sides KeepWorkers(const PlacementQuery& query, bool with_advice, bool with_room) const;
  void ScoreSides(const PlacementQuery& query, Sides* sides) const;
  std::vector<Candidate> Pairs(const PlacementQuery& query, Sides sides) const;
  // Says which side is missing.
  static absl::Status NobodyFor(const PlacementQuery& query, const Sides& left);
  static void JoinLocal(const Sides& sides, std::vector<Candidate>* pairs);
  void TakeTurn(Sides* sides) const;

  const PlacementPolicy policy_;
  const ScorerOptions scorer_options_;
  std::vector<std::unique_ptr<Filter>> filters_;
  std::vector<std::unique_ptr<Filter>> room_filters_;  // if they leave no pair, the status is ResourceExhausted
  std::unique_ptr<QueueScorer> queue_;                 // always computed: the other terms need it
  std::vector<std::unique_ptr<Scorer>> scorers_;
  std::vector<std::unique_ptr<Scorer>> expected_;  // their sum with queue_s and prefill_s is Candidate::expected_s
  std::unique_ptr<Picker> picker_;
  mutable std::mutex mutex_;  // guards the two below
  mutable std::mt19937_64 random_;
  mutable uint64_t turn_ = 0;
};

// A request's place, and what is expected there.
struct PlacedRequest {
  Candidate pair;             // points into the query's fleet
  uint32_t exact_tokens = 0;  // leading ones that are there exactly
  uint64_t tokens_to_compute = 0;
};

// Placement::Place, for the router and its simulator.
absl::StatusOr<PlacedRequest> PlaceRequest(const Placement& placement, const PlacementQuery& query);

// The load of a placed request on its two workers, until the holds are given up.
struct PlacedLoad {
  LoadTracker::Hold prefill, decode;
};
PlacedLoad Charge(LoadTracker& loads, const PlacementQuery& query, const PlacedRequest& placed, uint32_t sequences);

}  // namespace spl::router
