// The terms of the placement cost. All are seconds, so that queueing, compute and bytes add up honestly:
//
//   cost(p, d) = queue(p) + compute(p) + wire(p, d) + pressure(d)
#pragma once

#include "services/router/policies/policy.h"

namespace spl::router {

struct ScorerOptions {
  double default_prefill_tokens_per_s = 2'000;  // until a worker has measured itself
  double default_bytes_per_s = 1e9;             // until a connection has been measured
  double transfer_overlap = 0.8;  // share of the wire time hidden behind prefill compute (layer-wise push)
  double default_step_seconds = 0.01;
  double pressure_tokens = 16;  // decode steps of delay that a half-full worker is worth
};

// Prompt tokens that stand before this one at p. The worker's own count, or what this router has under way there when
// that is more: between two polls only the router knows.
class QueueScorer final : public Scorer {
 public:
  explicit QueueScorer(const ScorerOptions& options) : options_(options) {}
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;

 private:
  const ScorerOptions options_;
};

// Prompt tokens that p would have to compute after predicted prefix hits. The last token is always computed.
class ComputeScorer final : public Scorer {
 public:
  explicit ComputeScorer(const ScorerOptions& options) : options_(options) {}
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;

 private:
  const ScorerOptions options_;
};

// KV bytes of the whole prompt from p to d, less what overlaps with prefill.
class WireScorer final : public Scorer {
 public:
  explicit WireScorer(const ScorerOptions& options) : options_(options) {}
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;

 private:
  const ScorerOptions options_;
};

// Grows with the fuller of d's batch and d's pages, without bound towards full: load / (1 - load).
class PressureScorer final : public Scorer {
 public:
  explicit PressureScorer(const ScorerOptions& options) : options_(options) {}
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;

 private:
  const ScorerOptions options_;
};

}  // namespace spl::router
