// Placement in three stages: filters drop workers that cannot serve a request, scorers give each remaining (prefill,
// decode) pair a cost in seconds, a picker chooses one. All are pure functions of the query; they never block or call
// out.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/fleet/decode_sessions.h"
#include "services/router/fleet/load_tracker.h"
#include "services/router/fleet/prefix_index.h"
#include "services/router/fleet/snapshot.h"

namespace spl::router {

struct PlacementQuery {
  const FleetSnapshot& fleet;
  const LoadTracker& loads;
  uint32_t prompt_tokens = 0;
  uint32_t total_tokens = 0;  // prompt plus the least useful output
  // One entry per place (FleetSnapshot::place); empty: nothing is cached anywhere.
  std::span<const PredictedReuse> reuse = {};
  // Tokens of other routers that wait there, one entry per place (ForeignLoad); empty: use the workers' own counts.
  std::span<const uint64_t> foreign_tokens = {};
  double wire_share = 1;                           // share of the prompt's KV that the request's head classes send
  const HeldPrompt* held = nullptr;                // what a decode worker keeps of the conversation; may be null
  double aligned_cost = 0.25;                      // cost of an aligned token relative to a computed one (RequestCosts)
  double fetch_bytes_per_s = 0;                    // from the chunk store; 0: not measured yet
  bool structured_output = false;                  // true: only workers that keep to grammars may serve it
  const std::set<std::string>* full = nullptr;     // decode workers that had no room a moment ago; may be null
  const std::set<std::string>* leaving = nullptr;  // workers that the planner takes away; may be null
  const std::set<std::string>* failed = nullptr;   // workers that failed this request: used only if no other is left
};

// While one side is considered alone, the other side and the link are null.
struct Candidate {
  size_t prefill_idx = 0;  // number of the place
  const PrefillView* prefill = nullptr;
  const DecodeView* decode = nullptr;
  const PeerLink* link = nullptr;
  double queue_s = 0;         // at the prefill worker
  double excess_queue_s = 0;  // the part of it above the mean over all eligible prefill workers
  double cost_s = 0;
  double prefill_s = 0;   // time that computing and fetching take (PrefillSeconds); set for the chosen pair
  double expected_s = 0;  // time until the KV is at the decode worker, for any policy; set for the chosen pair
};

class Filter {
 public:
  virtual ~Filter() = default;
  // `place`: its number; the view belongs to that place.
  virtual bool KeepPrefill(const PlacementQuery&, const PrefillView&, size_t /*place*/) const { return true; }
  virtual bool KeepDecode(const PlacementQuery&, const DecodeView&) const { return true; }
  // An advisory filter that would drop everything is skipped.
  virtual bool advisory() const { return false; }
};

// The inputs of a cost term. Terms of one side are computed once per worker instead of once per pair.
enum class CostSide { kPrefill, kDecode, kPair };

class Scorer {
 public:
  virtual ~Scorer() = default;
  virtual CostSide side() const = 0;
  // Returns one term of the cost, in seconds, never negative.
  virtual double Seconds(const PlacementQuery& query, const Candidate& candidate) const = 0;
};

class Picker {
 public:
  virtual ~Picker() = default;
  // `candidates` is not empty. Returns an index into it.
  virtual size_t Pick(std::span<const Candidate> candidates, std::mt19937_64& random) const = 0;
};

}  // namespace spl::router
