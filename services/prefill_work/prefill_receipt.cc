#include "services/prefill_work/prefill_receipt.h"

#include <string>

#include "services/methods/methods.h"

namespace spl::prefill {
namespace {

void FillLines(const engine::LineReport& lines, v1::LineReceipt& receipt) {
  receipt.set_heads(static_cast<uint64_t>(lines.heads));
  receipt.set_dense_heads(static_cast<uint64_t>(lines.dense_heads));
  receipt.set_covered(lines.covered_share());
  receipt.set_cells(lines.cell_share());
  receipt.set_held_out(lines.held_out_share());
  receipt.set_held_out_lowest(lines.held_out_lowest);
}

void FillCopies(const engine::PrefillStats& stats, v1::CopyReceipt& receipt) {
  receipt.set_same_context(static_cast<uint32_t>(stats.copied.same_context));
  receipt.set_isolated(static_cast<uint32_t>(stats.copied.isolated));
  receipt.set_foreign(static_cast<uint32_t>(stats.copied.foreign));
  if (stats.probe_layers > 0) receipt.set_probe_layers(static_cast<uint32_t>(stats.probe_layers));
  if (stats.dense_layers > 0) receipt.set_dense_layers(static_cast<uint32_t>(stats.dense_layers));
  if (stats.recomputed_tokens == 0) return;
  v1::RecomputedReceipt& rows = *receipt.mutable_recomputed();
  rows.set_chosen(static_cast<uint32_t>(stats.recomputed_for.chosen));
  rows.set_links(static_cast<uint32_t>(stats.recomputed_for.links));
  rows.set_beside_new(static_cast<uint32_t>(stats.recomputed_for.beside_new));
  rows.set_tail(static_cast<uint32_t>(stats.recomputed_for.tail));
}

void FillChoice(const engine::MethodChoice& choice, v1::ChoiceReceipt& receipt) {
  receipt.set_why(std::string(engine::NameOf(choice.why)));
  receipt.set_method(choice.judged);
  receipt.set_work(choice.work);
  if (choice.quality > 0) receipt.set_quality(choice.quality);
  if (choice.agreement.weight > 0) {
    receipt.set_agreement(choice.agreement.share);
    receipt.set_agreement_low(choice.agreement.low);
    receipt.set_comparisons(choice.agreement.weight);
  }
  receipt.set_measured_beside(choice.measure);
}

}  // namespace

void FillReceipt(const engine::PrefillOutcome& outcome, v1::Receipt& receipt) {
  const engine::PrefillStats& stats = outcome.stats;
  receipt.set_reuse_policy(stats.policy);
  receipt.set_exact(stats.exact);
  receipt.set_prompt_tokens(static_cast<uint32_t>(stats.prompt_tokens));
  receipt.set_cached_tokens(static_cast<uint32_t>(stats.cached_tokens));
  if (stats.session_tokens > 0) receipt.set_session_tokens(static_cast<uint32_t>(stats.session_tokens));
  receipt.set_stored_tokens(static_cast<uint32_t>(stats.stored_tokens));
  receipt.set_aligned_tokens(static_cast<uint32_t>(stats.aligned_tokens));
  receipt.set_recomputed_tokens(static_cast<uint32_t>(stats.recomputed_tokens));
  receipt.set_computed_tokens(static_cast<uint32_t>(stats.computed_tokens));
  if (stats.aligned_tokens > 0) FillCopies(stats, *receipt.mutable_copies());
  if (stats.choice.why != engine::ChoiceReason::kNamed) FillChoice(stats.choice, *receipt.mutable_choice());
  if (stats.ffn_share < 1 || stats.restored_heads > 0) {
    receipt.mutable_head_classes()->set_ffn_share(stats.ffn_share);
    receipt.mutable_head_classes()->set_restored_heads(static_cast<uint32_t>(stats.restored_heads));
  }
  if (const auto* policy = methods::FindPolicy(stats.policy); policy != nullptr && policy->leaves_out_tokens) {
    receipt.mutable_samkv()->set_kept_share(stats.kept_share);
    receipt.mutable_samkv()->set_summaries_computed(static_cast<uint32_t>(stats.summaries_computed));
  }
  if (stats.lines.heads > 0) FillLines(stats.lines, *receipt.mutable_lines());
  if (stats.store_use != engine::StoreUse::kNone) {
    receipt.mutable_store()->set_use(std::string(engine::NameOf(stats.store_use)));
    receipt.mutable_store()->set_skipped_tokens(static_cast<uint32_t>(stats.skipped_tokens));
    receipt.mutable_store()->set_seconds(stats.store_s);
  }
  receipt.set_bytes_fetched(static_cast<uint64_t>(stats.fetched_bytes));
  receipt.set_queue_seconds(stats.queue_s);
  receipt.set_lookup_seconds(stats.lookup_s);
  receipt.set_fetch_seconds(stats.fetch_s);
  receipt.set_prefill_seconds(stats.prefill_s);
  if (!outcome.first_logits.empty())
    receipt.set_first_logits(outcome.first_logits.data(), outcome.first_logits.size() * sizeof(float));
}

void FillDelivery(const PromptDelivery& delivery, const v1::Ticket& ticket, v1::Receipt& receipt) {
  receipt.set_decode_worker(delivery.peer().endpoint.worker_id());
  receipt.set_transport(delivery.carrier());
  if (ticket.held_tokens() > 0) receipt.set_held_tokens(ticket.held_tokens());
}

}  // namespace spl::prefill
