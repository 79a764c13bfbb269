#include "services/router/policies/scorers.h"

#include <algorithm>
#include <cmath>

namespace spl::router {
namespace {

double TokensPerSecond(const ScorerOptions& options, const PrefillView& p) {
  return p.tokens_per_s > 0 ? p.tokens_per_s : options.default_prefill_tokens_per_s;
}

// Time to compute the last `tokens` of the prompt at p: the attention of a long prompt takes more than all the rest.
double ComputeSeconds(const ScorerOptions& options, const PlacementQuery& query, const PrefillView& p, double tokens) {
  if (p.first_tokens_per_s <= 0) return tokens / TokensPerSecond(options, p);
  const double front = query.prompt_tokens - tokens;
  return (tokens + p.pair_cost * tokens * (front + tokens / 2)) / p.first_tokens_per_s;
}

double StepSeconds(const ScorerOptions& options, const DecodeView& decode) {
  return decode.step_seconds > 0 ? decode.step_seconds : options.default_step_seconds;
}

// Every worker of a fleet serves the same model, so the first one's answer counts.
double KvBytesPerToken(const FleetSnapshot& fleet) {
  return fleet.decode.empty() ? 0 : static_cast<double>(fleet.decode.front().kv_bytes_per_token);
}

// Whether d has the tokens of query.held, and p does not send them there.
bool Holds(const PlacementQuery& query, const Candidate& candidate) {
  return candidate.link != nullptr && candidate.link->writer.skips_held() &&
         query.held->worker_id == candidate.decode->worker_id && query.held->epoch == candidate.decode->epoch;
}

}  // namespace

// For a decode worker, the tracker's prefill_tokens are the prompts of its sequences. Between two polls, reported pages
// alone would draw all requests to the same worker.
double PageLoad(const PlacementQuery& query, const DecodeView& decode) {
  if (decode.total_pages == 0) return 0;
  const double used = 1.0 - static_cast<double>(decode.free_pages) / static_cast<double>(decode.total_pages);
  if (decode.max_sequence_tokens == 0) return used;
  const double tokens = static_cast<double>(decode.max_sequence_tokens);
  const double ours = query.wire_share * static_cast<double>(query.loads.Of(decode.worker_id).prefill_tokens) / tokens;
  return std::max(used, ours) + query.wire_share * query.total_tokens / tokens;
}

double QueueScorer::Seconds(const PlacementQuery& query, const Candidate& candidate) const {
  const WorkerLoad ours = query.loads.Of(candidate.prefill->worker_id);
  const double tokens_per_s = TokensPerSecond(options_, *candidate.prefill);
  const double ours_s = ours.prefill_s > 0 ? ours.prefill_s : static_cast<double>(ours.prefill_tokens) / tokens_per_s;
  if (!query.foreign_tokens.empty())
    return ours_s + static_cast<double>(query.foreign_tokens[candidate.prefill_idx]) / tokens_per_s;
  return std::max(static_cast<double>(candidate.prefill->queued_tokens) / tokens_per_s, ours_s);
}

double ComputeScorer::TokensToCompute(const PlacementQuery& query, size_t prefill_idx) {
  const double prompt = query.prompt_tokens;
  if (query.reuse.empty()) return prompt;
  const PredictedReuse& reuse = query.reuse[prefill_idx];
  const double computed = prompt - reuse.prefix_tokens - (1 - query.aligned_cost) * reuse.aligned_tokens;
  return std::clamp(computed, std::min(1.0, prompt), prompt);
}

double ComputeScorer::Seconds(const PlacementQuery& query, const Candidate& candidate) const {
  const double whole_s = ComputeSeconds(options_, query, *candidate.prefill, query.prompt_tokens);
  const double computed_s =
      ComputeSeconds(options_, query, *candidate.prefill, TokensToCompute(query, candidate.prefill_idx));
  const double excess = whole_s > 0 ? candidate.excess_queue_s / whole_s : 0;
  return whole_s - (whole_s - computed_s) / (1 + options_.credit_decay * excess);
}

double FetchScorer::Seconds(const PlacementQuery& query, const Candidate& candidate) const {
  if (query.reuse.empty()) return 0;
  const double bandwidth = query.fetch_bytes_per_s > 0 ? query.fetch_bytes_per_s : options_.default_fetch_bytes_per_s;
  return KvBytesPerToken(query.fleet) * query.reuse[candidate.prefill_idx].fetched_tokens / bandwidth;
}

double PrefillSeconds(const ScorerOptions& options, const PlacementQuery& query, const Candidate& candidate) {
  const double tokens = ComputeScorer::TokensToCompute(query, candidate.prefill_idx);
  return ComputeSeconds(options, query, *candidate.prefill, tokens) + FetchScorer(options).Seconds(query, candidate);
}

double WireScorer::Seconds(const PlacementQuery& query, const Candidate& candidate) const {
  if (candidate.link != nullptr && candidate.link->in_place()) return 0;
  const double bandwidth = candidate.link != nullptr && candidate.link->bytes_per_s > 0 ? candidate.link->bytes_per_s
                                                                                        : options_.default_bytes_per_s;
  const double prompt = query.prompt_tokens;
  const double history = query.held == nullptr ? 0 : std::min<double>(prompt, query.held->tokens);
  double tokens = (prompt - history) * (1 - options_.transfer_overlap);
  // The prefill worker has the history, too: it computes nothing meanwhile that could hide the transfer.
  if (history > 0 && !Holds(query, candidate)) tokens += history;
  return static_cast<double>(candidate.decode->kv_bytes_per_token) * tokens * query.wire_share / bandwidth;
}

double SlowdownScorer::Seconds(const PlacementQuery& query, const Candidate& candidate) const {
  if (!candidate.prefill->local.has_value()) return 0;
  const double running = candidate.decode->running;
  if (running == 0) return 0;
  const double tokens = ComputeScorer::TokensToCompute(query, candidate.prefill_idx);
  const double slices = std::ceil(tokens / std::max(1u, candidate.prefill->local->slice_tokens));
  return slices * StepSeconds(options_, *candidate.decode) +
         options_.slowdown_share * running * tokens / TokensPerSecond(options_, *candidate.prefill);
}

double PressureScorer::Seconds(const PlacementQuery& query, const Candidate& candidate) const {
  const DecodeView& d = *candidate.decode;
  const double sequences = std::max(d.sequences, query.loads.Of(d.worker_id).sequences);
  const double batch_load = d.max_sequences > 0 ? sequences / d.max_sequences : sequences / 256.0;
  const double load = std::clamp(std::max(batch_load, PageLoad(query, d)), 0.0, 0.999);
  return options_.pressure_tokens * StepSeconds(options_, d) * load / (1 - load);
}

}  // namespace spl::router
