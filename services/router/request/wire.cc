#include "services/router/request/wire.h"

namespace spl::router {

v1::SamplingParams ToProto(const Sampling& s) {
  v1::SamplingParams out;
  if (s.max_tokens.has_value()) out.set_max_tokens(*s.max_tokens);
  out.set_min_tokens(s.min_tokens);
  out.set_temperature(s.temperature);
  out.set_top_k(s.top_k);
  out.set_top_p(s.top_p);
  out.set_min_p(s.min_p);
  out.set_repetition_penalty(s.repetition_penalty);
  out.set_presence_penalty(s.presence_penalty);
  out.set_frequency_penalty(s.frequency_penalty);
  if (s.seed.has_value()) out.set_seed(*s.seed);
  for (const auto& [id, bias] : s.logit_bias) (*out.mutable_logit_bias())[id] = bias;
  out.mutable_stop_token_ids()->Add(s.stop_token_ids.begin(), s.stop_token_ids.end());
  out.set_ignore_eos(s.ignore_eos);
  out.set_n(s.n);
  if (s.logprobs.has_value()) out.set_logprobs(*s.logprobs);
  return out;
}

Sampling FromProto(const v1::SamplingParams& p) {
  Sampling out;
  if (p.has_max_tokens()) out.max_tokens = p.max_tokens();
  out.min_tokens = p.min_tokens();
  if (p.has_temperature()) out.temperature = p.temperature();
  out.top_k = p.top_k();
  if (p.has_top_p()) out.top_p = p.top_p();
  out.min_p = p.min_p();
  if (p.has_repetition_penalty()) out.repetition_penalty = p.repetition_penalty();
  out.presence_penalty = p.presence_penalty();
  out.frequency_penalty = p.frequency_penalty();
  if (p.has_seed()) out.seed = p.seed();
  for (const auto& [id, bias] : p.logit_bias()) out.logit_bias[id] = bias;
  out.stop_token_ids.assign(p.stop_token_ids().begin(), p.stop_token_ids().end());
  out.ignore_eos = p.ignore_eos();
  out.n = p.n() == 0 ? 1 : p.n();
  if (p.has_logprobs()) out.logprobs = p.logprobs();
  return out;
}

v1::FinishReason ToProto(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return v1::FINISH_REASON_UNSPECIFIED;
    case FinishReason::kStop:
      return v1::FINISH_REASON_STOP;
    case FinishReason::kLength:
      return v1::FINISH_REASON_LENGTH;
    case FinishReason::kCancelled:
      return v1::FINISH_REASON_CANCELLED;
    case FinishReason::kError:
      return v1::FINISH_REASON_ERROR;
  }
  return v1::FINISH_REASON_ERROR;
}

FinishReason FromProto(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_UNSPECIFIED:
      return FinishReason::kNone;
    case v1::FINISH_REASON_STOP:
      return FinishReason::kStop;
    case v1::FINISH_REASON_LENGTH:
      return FinishReason::kLength;
    case v1::FINISH_REASON_CANCELLED:
      return FinishReason::kCancelled;
    default:
      return FinishReason::kError;  // also what a newer worker may know and this router does not
  }
}

v1::TokenLogprob LogprobToProto(const OutputToken& token) {
  v1::TokenLogprob out;
  out.set_logprob(token.logprob);
  for (const auto& [id, logprob] : token.top) {
    v1::TokenLogprob::Candidate* candidate = out.add_top();
    candidate->set_token_id(static_cast<uint32_t>(id));
    candidate->set_logprob(logprob);
  }
  return out;
}

v1::Receipt ToProto(const RequestReceipt& r) {
  v1::Receipt out;
  out.set_reuse_policy(r.reuse_policy);
  out.set_decode_selector(r.decode_selector);
  out.set_exact(r.exact);
  out.set_prompt_tokens(r.prompt_tokens);
  out.set_cached_tokens(r.cached_tokens);
  out.set_session_tokens(r.session_tokens);
  out.set_stored_tokens(r.stored_tokens);
  out.set_aligned_tokens(r.aligned_tokens);
  out.set_recomputed_tokens(r.recomputed_tokens);
  out.set_restored_heads(r.restored_heads);
  out.set_head_lease(r.head_lease);
  out.set_decode_restored_heads(r.decode_restored_heads);
  out.set_restore_misses(r.restore_misses);
  out.set_ffn_share(r.ffn_share);
  out.set_kept_share(r.kept_share);
  out.set_summaries_computed(r.summaries_computed);
  if (r.lines.has_value()) {
    v1::LineReceipt& lines = *out.mutable_lines();
    lines.set_heads(r.lines->heads);
    lines.set_dense_heads(r.lines->dense_heads);
    lines.set_covered(r.lines->covered);
    lines.set_cells(r.lines->cells);
    lines.set_held_out(r.lines->held_out);
    lines.set_held_out_lowest(r.lines->held_out_lowest);
  }
  out.set_computed_tokens(r.computed_tokens);
  out.set_bytes_fetched(r.bytes_fetched);
  out.set_bytes_moved(r.bytes_moved);
  out.set_decode_kv_bytes(r.decode_kv_bytes);
  out.set_queue_seconds(r.queue_seconds);
  out.set_lookup_seconds(r.lookup_seconds);
  out.set_fetch_seconds(r.fetch_seconds);
  out.set_prefill_seconds(r.prefill_seconds);
  out.set_transfer_seconds(r.transfer_seconds);
  out.set_ttft_seconds(r.ttft_seconds);
  out.mutable_ttft_stages()->insert(r.ttft_stages.begin(), r.ttft_stages.end());
  out.set_seed(r.seed);
  out.set_prefill(r.prefill);
  out.set_prefill_worker(r.prefill_worker);
  out.set_decode_worker(r.decode_worker);
  out.set_transport(r.transport);
  out.set_attempts(r.attempts);
  out.set_migrations(r.migrations);
  out.set_first_logits(r.first_logits);
  for (const auto& [name, version] : r.knowledge_bases) (*out.mutable_knowledge_bases())[name] = version;
  return out;
}

RequestReceipt FromProto(const v1::Receipt& r) {
  RequestReceipt out;
  out.reuse_policy = r.reuse_policy();
  out.decode_selector = r.decode_selector();
  out.exact = r.exact();
  out.prompt_tokens = r.prompt_tokens();
  out.cached_tokens = r.cached_tokens();
  out.session_tokens = r.session_tokens();
  out.stored_tokens = r.stored_tokens();
  out.aligned_tokens = r.aligned_tokens();
  out.recomputed_tokens = r.recomputed_tokens();
  out.restored_heads = r.restored_heads();
  out.head_lease = r.head_lease();
  out.decode_restored_heads = r.decode_restored_heads();
  out.restore_misses = r.restore_misses();
  out.ffn_share = r.ffn_share();
  out.kept_share = r.kept_share();
  out.summaries_computed = r.summaries_computed();
  if (r.has_lines())
    out.lines = {r.lines().heads(), r.lines().dense_heads(), r.lines().covered(),
                 r.lines().cells(), r.lines().held_out(),    r.lines().held_out_lowest()};
  out.computed_tokens = r.computed_tokens();
  out.bytes_fetched = r.bytes_fetched();
  out.bytes_moved = r.bytes_moved();
  out.decode_kv_bytes = r.decode_kv_bytes();
  out.queue_seconds = r.queue_seconds();
  out.lookup_seconds = r.lookup_seconds();
  out.fetch_seconds = r.fetch_seconds();
  out.prefill_seconds = r.prefill_seconds();
  out.transfer_seconds = r.transfer_seconds();
  out.ttft_seconds = r.ttft_seconds();
  out.ttft_stages.insert(r.ttft_stages().begin(), r.ttft_stages().end());
  out.seed = r.seed();
  out.prefill = r.prefill();
  out.prefill_worker = r.prefill_worker();
  out.decode_worker = r.decode_worker();
  out.transport = r.transport();
  out.attempts = r.attempts();
  out.migrations = r.migrations();
  out.first_logits = r.first_logits();
  out.knowledge_bases.insert(r.knowledge_bases().begin(), r.knowledge_bases().end());
  return out;
}

}  // namespace spl::router
