// The terms of the placement cost. All are seconds, so that queueing, compute and bytes add up honestly:
//
//   cost(p, d) = queue(p) + compute(p) + fetch(p) + wire(p, d) + slowdown(p, d) + pressure(d)
#pragma once

#include "services/router/policies/policy.h"

namespace spl::router {

struct ScorerOptions {
  double default_prefill_tokens_per_s = 2'000;  // until a worker has measured itself
  double default_bytes_per_s = 1e9;             // until a connection has been measured
  double default_fetch_bytes_per_s = 1e9;       // until a fetch from the chunk store has been seen
  double transfer_overlap = 0.8;  // share of the wire time hidden behind prefill compute (layer-wise push)
  double default_step_seconds = 0.01;
  double pressure_tokens = 16;  // decode steps of delay that a half-full worker is worth
  // Spreading of hot prompts: what a hit saves counts 1 / (1 + decay · x) at a worker whose queue is longer than the
  // fleet's mean by x times the computation of this prompt. 0: a hit counts the same everywhere.
  double credit_decay = 4;
  // Of each second that a running sequence waits for a prompt computed beside it, what counts: its reader has text in
  // hand, whoever waits for a first token has none.
  double slowdown_share = 0.25;
};

// Share of d's pages in use when this request is there, too. 0: the worker did not tell its size.
double PageLoad(const PlacementQuery& query, const DecodeView& decode);

// Prompt tokens that stand before this one at p: what this router has under way there, and what others have. Where the
// latter is not known, the worker's own count when that is more. Candidate::queue_s.
class QueueScorer final : public Scorer {
 public:
  explicit QueueScorer(const ScorerOptions& options) : options_(options) {}
  CostSide side() const override { return CostSide::kPrefill; }
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;

 private:
  const ScorerOptions options_;
};

// Prompt tokens that p would have to compute after predicted hits: those without any KV in full, those of aligned
// segments for their share. The last token is always computed. What hits save is less for an overloaded holder
// (credit_decay).
class ComputeScorer final : public Scorer {
 public:
  explicit ComputeScorer(const ScorerOptions& options) : options_(options) {}
  CostSide side() const override { return CostSide::kPrefill; }
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;
  // Without the decay: what is really expected. 0 ≤ returned ≤ prompt_tokens.
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

// KV bytes of the prompt from p to d, of the heads that are sent, less what overlaps with prefill.
class WireScorer final : public Scorer {
 public:
  explicit WireScorer(const ScorerOptions& options) : options_(options) {}
  CostSide side() const override { return CostSide::kPair; }
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;

 private:
  const ScorerOptions options_;
};

// Of a prompt that d computes itself, between its steps of decoding: its slices wait for a step each, and so does every
// sequence there for each slice.
class SlowdownScorer final : public Scorer {
 public:
  explicit SlowdownScorer(const ScorerOptions& options) : options_(options) {}
  CostSide side() const override { return CostSide::kPair; }
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;

 private:
  const ScorerOptions options_;
};

// Grows with the fuller of d's batch and d's pages, without bound towards full: load / (1 - load).
class PressureScorer final : public Scorer {
 public:
  explicit PressureScorer(const ScorerOptions& options) : options_(options) {}
  CostSide side() const override { return CostSide::kDecode; }
  double Seconds(const PlacementQuery& query, const Candidate& candidate) const override;

 private:
  const ScorerOptions options_;
};

}  // namespace spl::router
