// The placement profiles: which filters, which terms, which picker.
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
  kRoundRobin,   // one after the other on either side
  kLeastLoaded,  // queue and pressure
  kPrefixOnly,   // the longest prefix in a worker's pages; decode workers by pressure
};
// "splice", "round-robin", "least-loaded", "prefix-only". InvalidArgument lists them.
absl::StatusOr<PlacementPolicy> ParsePlacementPolicy(std::string_view name);

struct PlacementOptions {
  PlacementPolicy policy = PlacementPolicy::kSplice;
  ScorerOptions scorer;
  double temperature = 0;      // see SoftmaxPicker
  double max_decode_load = 1;  // see RoomToGrowFilter
  uint64_t seed = 0;           // of tie breaks; 0: from the system
};

// Pairs are those of connected prefill and decode workers, and with the policy kSplice every decode worker with itself
// where it prefills prompts as short as this one.
//
// Thread-safe. Cost: workers × terms of their side, and pairs × terms of pairs, all in memory. Of fleets with more than
// kMaxPairs connected pairs only the kShortlist cheapest prefill workers and for each of these the kShortlist cheapest
// of its decode workers are paired: exact where all links are equal, near it where they are not. Decode workers that
// prefill are looked at all.
class Placement {
 public:
  static constexpr size_t kMaxPairs = 1024;
  static constexpr size_t kShortlist = 16;

  explicit Placement(const PlacementOptions& options);

  // The pair to use; it points into query.fleet. Unavailable: no connected pair, or none that fits. ResourceExhausted:
  // every pair left out for lack of room.
  absl::StatusOr<Candidate> Place(const PlacementQuery& query) const;

 private:
  struct Sides {
    std::vector<Candidate> prefill, decode;
    std::vector<Candidate> local;  // decode workers as places for this prompt: each is paired with itself alone
  };

  Sides KeepWorkers(const PlacementQuery& query, bool with_advice, bool with_room) const;
  void ScoreSides(const PlacementQuery& query, Sides* sides) const;
  std::vector<Candidate> Pairs(const PlacementQuery& query, Sides sides) const;
  // Which side is missing.
  static absl::Status NobodyFor(const PlacementQuery& query, const Sides& left);
  static void JoinLocal(const Sides& sides, std::vector<Candidate>* pairs);
  void TakeTurn(Sides* sides) const;

  const PlacementPolicy policy_;
  std::vector<std::unique_ptr<Filter>> filters_;
  std::vector<std::unique_ptr<Filter>> room_filters_;  // leaving nothing behind them is ResourceExhausted
  std::unique_ptr<QueueScorer> queue_;                 // always computed: the others need it
  std::vector<std::unique_ptr<Scorer>> scorers_;
  std::vector<std::unique_ptr<Scorer>> expected_;  // what with the queue is Candidate::expected_s
  std::unique_ptr<Picker> picker_;
  mutable std::mutex mutex_;  // guards the two below
  mutable std::mt19937_64 random_;
  mutable uint64_t turn_ = 0;
};

}  // namespace spl::router
