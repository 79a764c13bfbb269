#include "services/router/policies/scorers.h"

#include <algorithm>

namespace spl::router {
namespace {

double TokensPerSecond(const ScorerOptions& options, const Candidate& candidate) {
  const double measured = candidate.prefill->tokens_per_s;
  return measured > 0 ? measured : options.default_prefill_tokens_per_s;
}

}  // namespace

double QueueScorer::Seconds(const PlacementQuery& query, const Candidate& candidate) const {
  const uint64_t ours = query.loads.Of(candidate.prefill->worker_id).prefill_tokens;
  const uint64_t waiting = std::max(candidate.prefill->queued_tokens, ours);
  return static_cast<double>(waiting) / TokensPerSecond(options_, candidate);
}

double ComputeScorer::Seconds(const PlacementQuery& query, const Candidate& candidate) const {
  const uint64_t cached = query.cached_tokens.empty() ? 0 : query.cached_tokens[candidate.prefill_idx];
  const uint64_t computed = query.prompt_tokens > cached ? query.prompt_tokens - cached : 1;
  return static_cast<double>(computed) / TokensPerSecond(options_, candidate);
}

double WireScorer::Seconds(const PlacementQuery& query, const Candidate& candidate) const {
  const double bandwidth = candidate.link != nullptr && candidate.link->bytes_per_s > 0 ? candidate.link->bytes_per_s
                                                                                        : options_.default_bytes_per_s;
  const double bytes = static_cast<double>(candidate.decode->kv_bytes_per_token) * query.prompt_tokens;
  return bytes / bandwidth * (1 - options_.transfer_overlap);
}

double PressureScorer::Seconds(const PlacementQuery& query, const Candidate& candidate) const {
  const DecodeView& d = *candidate.decode;
  const double sequences = std::max(d.sequences, query.loads.Of(d.worker_id).sequences);
  const double batch_load = d.max_sequences > 0 ? sequences / d.max_sequences : sequences / 256.0;
  const double page_load =
      d.total_pages > 0 ? 1.0 - static_cast<double>(d.free_pages) / static_cast<double>(d.total_pages) : 0.0;
  const double load = std::clamp(std::max(batch_load, page_load), 0.0, 0.999);
  const double step = d.step_seconds > 0 ? d.step_seconds : options_.default_step_seconds;
  return options_.pressure_tokens * step * load / (1 - load);
}

}  // namespace spl::router
