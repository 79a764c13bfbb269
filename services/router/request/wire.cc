#include "services/router/wire.h"

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

v1::ReuseOptions ToProto(const ReuseRequest& r) {
  v1::ReuseOptions out;
  out.set_policy(r.policy);
  out.set_decode(r.decode);
  out.set_quality(r.quality);
  out.set_auto_segments(r.auto_segments);
  out.set_publish(r.publish);
  if (r.dense_layers.has_value()) out.set_dense_layers(*r.dense_layers);
  if (r.recompute_share.has_value()) out.set_recompute_share(*r.recompute_share);
  if (r.recompute_min.has_value()) out.set_recompute_min(*r.recompute_min);
  if (r.recompute_max.has_value()) out.set_recompute_max(*r.recompute_max);
  if (r.overflow_tokens.has_value()) out.set_overflow_tokens(*r.overflow_tokens);
  if (r.score_pool.has_value()) out.set_score_pool(*r.score_pool);
  if (r.tail_tokens.has_value()) out.set_tail_tokens(*r.tail_tokens);
  if (r.link_tokens.has_value()) out.set_link_tokens(*r.link_tokens);
  if (r.blend_share.has_value()) out.set_blend_share(*r.blend_share);
  if (r.epic_tokens.has_value()) out.set_epic_tokens(*r.epic_tokens);
  if (r.max_recompute_fraction.has_value()) out.set_max_recompute_fraction(*r.max_recompute_fraction);
  out.set_full_kv(r.full_kv);
  if (r.score_all_heads.has_value()) out.set_score_all_heads(*r.score_all_heads);
  if (r.ffn_dense_layers.has_value()) out.set_ffn_dense_layers(*r.ffn_dense_layers);
  if (r.ffn_recent.has_value()) out.set_ffn_recent(*r.ffn_recent);
  if (r.ffn_deep_layer.has_value()) out.set_ffn_deep_layer(*r.ffn_deep_layer);
  if (r.ffn_mass.has_value()) out.set_ffn_mass(*r.ffn_mass);
  if (r.ffn_deep_mass.has_value()) out.set_ffn_deep_mass(*r.ffn_deep_mass);
  if (r.rec_frac.has_value()) out.set_rec_frac(*r.rec_frac);
  if (r.restore_share.has_value()) out.set_restore_share(*r.restore_share);
  if (r.restore_threshold.has_value()) out.set_restore_threshold(*r.restore_threshold);
  out.set_decode_restore(r.decode_restore);
  if (r.decode_restore_interval.has_value()) out.set_decode_restore_interval(*r.decode_restore_interval);
  if (r.decode_restore_threshold.has_value()) out.set_decode_restore_threshold(*r.decode_restore_threshold);
  if (r.decode_budget.has_value()) out.set_decode_budget(*r.decode_budget);
  if (r.decode_dense_layers.has_value()) out.set_decode_dense_layers(*r.decode_dense_layers);
  if (r.decode_recent.has_value()) out.set_decode_recent(*r.decode_recent);
  if (r.decode_dims.has_value()) out.set_decode_dims(*r.decode_dims);
  if (r.decode_refresh_interval.has_value()) out.set_decode_refresh_interval(*r.decode_refresh_interval);
  if (r.decode_window.has_value()) out.set_decode_window(*r.decode_window);
  if (r.decode_sinks.has_value()) out.set_decode_sinks(*r.decode_sinks);
  if (r.budget_ratio.has_value()) out.set_budget_ratio(*r.budget_ratio);
  out.set_fusion(r.fusion);
  out.set_recompute(r.recompute);
  out.set_choose(r.choose);
  if (r.personal_bias.has_value()) out.set_personal_bias(*r.personal_bias);
  if (r.quantized_copies.has_value()) out.set_quantized_copies(*r.quantized_copies);
  out.set_compact(r.compact);
  out.set_head_classes(r.head_classes);
  if (r.line_samples.has_value()) out.set_line_samples(*r.line_samples);
  if (r.line_alpha.has_value()) out.set_line_alpha(*r.line_alpha);
  if (r.line_min_span.has_value()) out.set_line_min_span(*r.line_min_span);
  if (r.line_columns.has_value()) out.set_line_columns(*r.line_columns);
  if (r.line_slashes.has_value()) out.set_line_slashes(*r.line_slashes);
  if (r.band_sinks.has_value()) out.set_band_sinks(*r.band_sinks);
  if (r.band_window.has_value()) out.set_band_window(*r.band_window);
  if (r.band_last_rows.has_value()) out.set_band_last_rows(*r.band_last_rows);
  out.set_return_first_logits(r.return_first_logits);
  return out;
}

ReuseRequest FromProto(const v1::ReuseOptions& o) {
  ReuseRequest out;
  out.policy = o.policy();
  out.decode = o.decode();
  out.quality = o.quality();
  out.auto_segments = o.auto_segments();
  out.publish = !o.has_publish() || o.publish();
  if (o.has_dense_layers()) out.dense_layers = o.dense_layers();
  if (o.has_recompute_share()) out.recompute_share = o.recompute_share();
  if (o.has_recompute_min()) out.recompute_min = o.recompute_min();
  if (o.has_recompute_max()) out.recompute_max = o.recompute_max();
  if (o.has_overflow_tokens()) out.overflow_tokens = o.overflow_tokens();
  if (o.has_score_pool()) out.score_pool = o.score_pool();
  if (o.has_tail_tokens()) out.tail_tokens = o.tail_tokens();
  if (o.has_link_tokens()) out.link_tokens = o.link_tokens();
  if (o.has_blend_share()) out.blend_share = o.blend_share();
  if (o.has_epic_tokens()) out.epic_tokens = o.epic_tokens();
  if (o.has_max_recompute_fraction()) out.max_recompute_fraction = o.max_recompute_fraction();
  out.full_kv = o.full_kv();
  if (o.has_score_all_heads()) out.score_all_heads = o.score_all_heads();
  if (o.has_ffn_dense_layers()) out.ffn_dense_layers = o.ffn_dense_layers();
  if (o.has_ffn_recent()) out.ffn_recent = o.ffn_recent();
  if (o.has_ffn_deep_layer()) out.ffn_deep_layer = o.ffn_deep_layer();
  if (o.has_ffn_mass()) out.ffn_mass = o.ffn_mass();
  if (o.has_ffn_deep_mass()) out.ffn_deep_mass = o.ffn_deep_mass();
  if (o.has_rec_frac()) out.rec_frac = o.rec_frac();
  if (o.has_restore_share()) out.restore_share = o.restore_share();
  if (o.has_restore_threshold()) out.restore_threshold = o.restore_threshold();
  out.decode_restore = o.decode_restore();
  if (o.has_decode_restore_interval()) out.decode_restore_interval = o.decode_restore_interval();
  if (o.has_decode_restore_threshold()) out.decode_restore_threshold = o.decode_restore_threshold();
  if (o.has_decode_budget()) out.decode_budget = o.decode_budget();
  if (o.has_decode_dense_layers()) out.decode_dense_layers = o.decode_dense_layers();
  if (o.has_decode_recent()) out.decode_recent = o.decode_recent();
  if (o.has_decode_dims()) out.decode_dims = o.decode_dims();
  if (o.has_decode_refresh_interval()) out.decode_refresh_interval = o.decode_refresh_interval();
  if (o.has_decode_window()) out.decode_window = o.decode_window();
  if (o.has_decode_sinks()) out.decode_sinks = o.decode_sinks();
  if (o.has_budget_ratio()) out.budget_ratio = o.budget_ratio();
  out.fusion = o.fusion();
  out.recompute = o.recompute();
  out.choose = o.choose();
  if (o.has_personal_bias()) out.personal_bias = o.personal_bias();
  if (o.has_quantized_copies()) out.quantized_copies = o.quantized_copies();
  out.compact = o.compact();
  out.head_classes = o.head_classes();
  if (o.has_line_samples()) out.line_samples = o.line_samples();
  if (o.has_line_alpha()) out.line_alpha = o.line_alpha();
  if (o.has_line_min_span()) out.line_min_span = o.line_min_span();
  if (o.has_line_columns()) out.line_columns = o.line_columns();
  if (o.has_line_slashes()) out.line_slashes = o.line_slashes();
  if (o.has_band_sinks()) out.band_sinks = o.band_sinks();
  if (o.has_band_window()) out.band_window = o.band_window();
  if (o.has_band_last_rows()) out.band_last_rows = o.band_last_rows();
  out.return_first_logits = o.return_first_logits();
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
