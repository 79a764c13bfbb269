// The terms of the placement cost. All are in seconds, so that queueing, compute and bytes can be added:
//
//   cost(p, d) = queue(p) + compute(p) + fetch(p) + wire(p, d) + slowdown(p, d) + pressure(d)
#pragma once

#include "services/router/policies/policy.h"

namespace spl::router {

struct ScorerOptions {
  double default_prefill_tokens_per_s = 2'000;  // until a worker has measured itself
  double default_bytes_per_s = 1e9;             // until a connection has been measured
  double default_fetch_bytes_per_s = 1e9;       // until a fetch from the chunk store has been seen
  double transfer_overlap = 0.8;  // share of the wire time that is hidden behind prefill compute (layer-wise push)
  double default_step_seconds = 0.01;
  double pressure_tokens = 16;  // cost of a half-full worker, in decode steps of delay
  // Spreads hot prompts: the saving of a hit counts 1 / (1 + decay · x) at a worker whose queue exceeds the fleet's
  // mean by x times the computation of this prompt. 0: a hit counts the same everywhere. A queue costs its seconds
  // already: more makes copies where waiting would be faster, and they push out others.
  double credit_decay = 0;
  // Weight of each second that a running sequence waits for a prompt computed beside it: its reader already has text,
  // while a client that waits for a first token has none.
  double slowdown_share = 0.25;
};

// Share of d's pages in use with this request included. 0: the worker does not report its size.
double PageLoad(const PlacementQuery& query, const DecodeView& decode);

// Time for the prompts ahead of this one at p: this router's load there, plus that of others. If the latter is unknown,
// the worker's own count, if that is larger. Sets Candidate::queue_s.
class QueueScorer final : public Scorer {
 public:
  explicit QueueScorer(const ScorerOptions& options) : options_(options) {}
  CostSide side() const override { return CostSide::kPrefill; }
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;

 private:
  const ScorerOptions options_;
};

// Prompt tokens that p would have to compute after predicted hits: tokens without KV count fully, tokens of aligned
// segments by their share. The last token is always computed. An overloaded holder's hits save less (credit_decay).
class ComputeScorer final : public Scorer {
 public:
  explicit ComputeScorer(const ScorerOptions& options) : options_(options) {}
  CostSide side() const override { return CostSide::kPrefill; }
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;
  // Without the decay: the expected amount. 0 ≤ result ≤ prompt_tokens.
  static double TokensToCompute(const PlacementQuery& query, size_t prefill_idx);

 private:
  const ScorerOptions options_;
};

// KV bytes that p would fetch from the chunk store.
class FetchScorer final : public Scorer {
 public:
  explicit FetchScorer(const ScorerOptions& options) : options_(options) {}
  CostSide side() const override { return CostSide::kPrefill; }
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;

 private:
  const ScorerOptions options_;
};

// Time that the prompt takes at p, computing and fetching, without any decay.
double PrefillSeconds(const ScorerOptions& options, const PlacementQuery& query, const Candidate& candidate);

// KV bytes of the prompt from p to d, for the heads that are sent, minus the part that overlaps with prefill. Tokens
// that d keeps from the conversation's last turn are not sent. To other workers they are sent without any overlap,
// because the prefill worker need not compute them. So a turn goes back to d unless waiting there costs more than the
// bytes. In place nothing is sent.
class WireScorer final : public Scorer {
 public:
  explicit WireScorer(const ScorerOptions& options) : options_(options) {}
  CostSide side() const override { return CostSide::kPair; }
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;

 private:
  const ScorerOptions options_;
};

// For a prompt that d computes itself between its decode steps: each of its slices waits for a step, and every sequence
// there waits for each slice.
class SlowdownScorer final : public Scorer {
 public:
  explicit SlowdownScorer(const ScorerOptions& options) : options_(options) {}
  CostSide side() const override { return CostSide::kPair; }
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;

 private:
  const ScorerOptions options_;
};

// Grows with the fuller of d's batch and d's pages, without limit as they fill up: load / (1 - load).
class PressureScorer final : public Scorer {
 public:
  explicit PressureScorer(const ScorerOptions& options) : options_(options) {}
  CostSide side() const override { return CostSide::kDecode; }
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;

 private:
  const ScorerOptions options_;
};

}  // namespace spl::router
