// Placement in three stages: filters drop (prefill, decode) pairs that cannot serve a request, scorers give each pair
// left a cost in seconds, a picker takes one. All are pure functions of the query; none blocks, none calls out.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/router/fleet/load_tracker.h"
#include "services/router/fleet/snapshot.h"

namespace spl::router {

struct PlacementQuery {
  const FleetSnapshot& fleet;
  const LoadTracker& loads;
  uint32_t prompt_tokens = 0;
  uint32_t total_tokens = 0;                    // prompt plus the least useful output
  std::span<const uint64_t> cached_tokens;      // predicted prefix hits, one per fleet.prefill entry
  const std::set<std::string>* full = nullptr;  // decode workers that had no room a moment ago
  const std::set<std::string>* failed =
      nullptr;  // workers that failed this request: used only when nothing else is left
};

struct Candidate {
  size_t prefill_idx = 0;
  const PrefillView* prefill = nullptr;
  const DecodeView* decode = nullptr;
  const PeerLink* link = nullptr;
  double cost_s = 0;
};

class Filter {
 public:
  virtual ~Filter() = default;
  virtual bool Keep(const PlacementQuery& query, const Candidate& candidate) const = 0;
  // An advisory filter that would leave nothing is skipped.
  virtual bool advisory() const { return false; }
};

class Scorer {
 public:
  virtual ~Scorer() = default;
  // One term of the cost, in seconds, never negative.
  virtual double Seconds(const PlacementQuery& query, const Candidate& candidate) const = 0;
};

class Picker {
 public:
  virtual ~Picker() = default;
  // `candidates` is not empty; returns an index into it.
  virtual size_t Pick(std::span<const Candidate> candidates, std::mt19937_64& random) const = 0;
};

}  // namespace spl::router
