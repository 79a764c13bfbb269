#include "services/prefill_work/prefill_core.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "services/base/fault_point.h"
#include "services/base/grpc_status.h"
#include "services/base/ids.h"
#include "services/base/status.h"
#include "services/engine/methods/selection_methods.h"
#include "services/methods/methods.h"
#include "services/methods/quality.h"
#include "services/prefill_work/in_place_delivery.h"
#include "services/prefill_work/kv_push.h"
#include "services/prefill_work/prefill_receipt.h"
#include "services/prefill_work/ticket_check.h"
#include "services/wire/convert.h"
#include "services/wire/structured_output.h"
#include "services/wire/ticket_metrics.h"

namespace spl::prefill {
namespace {

FaultPoint run_fault("prefill.run");

prometheus::Counter& LineCounter(Metrics& metrics, const char* kind) {
  return metrics.Counter("splice_prefill_line_heads_total",
                         "KV heads times layers that chose lines, by whether they fell back to everything.",
                         {{"kind", kind}});
}

prometheus::Counter& CopiedCounter(Metrics& metrics, const char* context) {
  return metrics.Counter("splice_copied_tokens_total", "Copied tokens by the text that their KV was computed behind.",
                         {{"context", context}});
}

prometheus::Counter& SkippedCounter(Metrics& metrics, engine::StoreUse use) {
  return metrics.Counter("splice_store_skipped_tokens_total",
                         "Tokens that were computed although the chunk store has their KV, by the reason.",
                         {{"reason", std::string(engine::NameOf(use))}});
}

// Shares near 1 show what methods promise, small ones what they save.
std::vector<double> ShareBuckets() { return {.02, .05, .1, .2, .3, .5, .7, .8, .9, .95, .98, .99, .995, .999, 1}; }

prometheus::Histogram& StageHistogram(Metrics& metrics, const char* stage) {
  return metrics.Histogram(metric::kTtftStageSeconds, "Where the time to the first token goes.", buckets::Stage(),
                           {{"stage", stage}});
}

// Rows of fewer alternatives than were asked for, which only a tiny vocabulary has, are filled up with token 0 at -inf.
void FillPromptLogprobs(const std::vector<engine::TokenLogprob>& from, const std::optional<int32_t>& num_top,
                        v1::PrefillResponse& response) {
  if (!num_top.has_value()) return;
  v1::PromptLogprobs& out = *response.mutable_prompt_logprobs();
  out.set_num_top(static_cast<uint32_t>(*num_top));
  out.mutable_logprobs()->Reserve(static_cast<int>(from.size()));
  for (const engine::TokenLogprob& token : from) {
    out.add_logprobs(token.logprob);
    for (size_t i = 0; i < static_cast<size_t>(*num_top); ++i) {
      const bool has = i < token.top.size();
      out.add_top_ids(has ? static_cast<uint32_t>(token.top[i].first) : 0);
      out.add_top_logprobs(has ? token.top[i].second : -std::numeric_limits<float>::infinity());
    }
  }
}

// Takes over the fields that no other check is needed for. InvalidArgument: the quality.
absl::Status TakeFields(const v1::PrefillRequest& request, engine::PrefillRequest& prefill) {
  const std::optional<methods::Quality> quality = methods::ParseQuality(request.reuse().quality());
  if (!quality.has_value())
    return InvalidArgument("quality is '{}', it must be strict, balanced or a number above 0 and at most 1",
                           request.reuse().quality());
  prefill.terms.choose = request.choose_method();
  prefill.terms.quality = quality->agreement;
  prefill.num_output_tokens = request.num_output_tokens();
  prefill.reuse_auto = request.reuse().auto_segments();
  prefill.publish = !request.reuse().has_publish() || request.reuse().publish();
  prefill.return_first_logits = request.reuse().return_first_logits();
  prefill.session = request.session();
  if (request.has_prompt_logprobs())
    prefill.prompt_logprobs = static_cast<int32_t>(std::min<uint32_t>(request.prompt_logprobs(), INT32_MAX));
  return absl::OkStatus();
}

engine::SamplingParams SamplingOf(const v1::PrefillRequest& request,
                                  std::shared_ptr<const grammar::TokenGrammar> grammar) {
  engine::SamplingParams sampling = wire::FromProto(request.sampling());
  sampling.grammar = std::move(grammar);
  return sampling;
}

}  // namespace

PrefillCore::PrefillCore(engine::PrefillEngine& engine, PeerTable& peers, PushWorker& pushes, TicketGuard& tickets,
                         PrefillCoreOptions options, Metrics& metrics, const Tracer& tracer)
    : engine_(engine),
      peers_(peers),
      pushes_(pushes),
      tickets_(tickets),
      options_(std::move(options)),
      tracer_(tracer),
      metrics_(metrics),
      fidelity_(engine, options_.fidelity, metrics),
      tickets_revoked_(metrics.Gauge("splice_prefill_tickets_revoked",
                                     "Given-up tickets that are remembered: a call that comes late is refused.")),
      agreement_records_(
          metrics.Gauge("splice_fidelity_records", "Namespaces and methods whose agreement with exact is on record.")),
      agreement_forgotten_(
          metrics.Counter("splice_fidelity_records_forgotten_total", "Such records that made room for others.")),
      late_runs_(metrics.Counter("splice_prefill_late_runs_total",
                                 "Calls that came after their ticket had been revoked, and were refused.")),
      tickets_invalid_(wire::RefusedTicketsCounter(metrics, "invalid")),
      tickets_replayed_(wire::RefusedTicketsCounter(metrics, "replayed")),
      prompt_tokens_(metrics.Counter(metric::kPromptTokensTotal, "Prompt tokens of finished prefills.")),
      reused_prefix_(
          metrics.Counter(metric::kReuseTokensTotal, "Prompt tokens by what was done.", {{"kind", "prefix"}})),
      reused_session_(
          metrics.Counter(metric::kReuseTokensTotal, "Prompt tokens by what was done.", {{"kind", "session"}})),
      reused_segment_(
          metrics.Counter(metric::kReuseTokensTotal, "Prompt tokens by what was done.", {{"kind", "segment"}})),
      copied_same_(CopiedCounter(metrics, "same")),
      copied_isolated_(CopiedCounter(metrics, "isolated")),
      copied_foreign_(CopiedCounter(metrics, "foreign")),
      recomputed_(metrics.Counter("splice_recomputed_tokens_total",
                                  "Tokens of segments that were computed afresh above the dense layers.")),
      reused_miss_(metrics.Counter(metric::kReuseTokensTotal, "Prompt tokens by what was done.", {{"kind", "miss"}})),
      fetched_bytes_(metrics.Counter("splice_store_fetched_bytes_total", "KV bytes read from the chunk store.")),
      skipped_slower_(SkippedCounter(metrics, engine::StoreUse::kSlower)),
      skipped_late_(SkippedCounter(metrics, engine::StoreUse::kLate)),
      skipped_shared_(SkippedCounter(metrics, engine::StoreUse::kShared)),
      store_rate_(metrics.Gauge("splice_store_link_bytes_per_second",
                                "Measured rate at which the chunk stores deliver KV; 0: not measured yet.")),
      store_latency_(metrics.Gauge("splice_store_link_latency_seconds",
                                   "Measured time until the first chunk of a fetch, without its bytes.")),
      line_prompts_(metrics.Counter("splice_prefill_line_prompts_total", "Prompts whose heads chose lines.")),
      line_heads_(LineCounter(metrics, "lines")),
      line_dense_heads_(LineCounter(metrics, "dense")),
      line_covered_(metrics.Histogram("splice_prefill_line_covered_share",
                                      "Lower bound of the sampled rows' attention that a prompt's lines have.",
                                      ShareBuckets())),
      line_cells_(metrics.Histogram("splice_prefill_line_cells_share",
                                    "Cells that attention over lines computed, of a causal prefill's.",
                                    ShareBuckets())),
      line_held_out_(metrics.Histogram("splice_prefill_line_held_out_share",
                                       "Attention of rows outside of the sample that a prompt's lines have.",
                                       ShareBuckets())),
      stage_queue_(StageHistogram(metrics, "queue")),
      stage_lookup_(StageHistogram(metrics, "lookup")),
      stage_fetch_(StageHistogram(metrics, "fetch")),
      stage_prefill_(StageHistogram(metrics, "prefill")) {}

void PrefillCore::UpdateGauges() {
  const engine::LinkMeter::Estimate link = engine_.store_link();
  store_rate_.Set(link.bytes_per_s);
  store_latency_.Set(link.latency_s);
  const TicketGuard::Stats tickets = tickets_.stats();
  tickets_revoked_.Set(static_cast<double>(tickets.num_revoked));
  RaiseTo(late_runs_, tickets.num_refused);
  const AgreementRecords::Stats records = fidelity_.records().stats();
  agreement_records_.Set(static_cast<double>(records.num_records));
  RaiseTo(agreement_forgotten_, records.num_forgotten);
}

grpc::ServerUnaryReactor* PrefillCore::Run(grpc::CallbackServerContext* context, const v1::PrefillRequest* request,
                                           v1::PrefillResponse* response, bool draining) {
  auto* const call = new RunCall(engine_, tracer_, "prefill.run", options_.worker_id, context, request, response);
  if (draining) return call->EndUnless(absl::UnavailableError("the prefill worker is draining"));
  // The call lives until it has ended, which is not before this is called.
  wire::FindGrammar(options_.grammars.get(), request->sampling(), [this, call](grammar::CompiledGrammar grammar) {
    call->EndUnless(grammar.ok() ? Start(*call, *std::move(grammar)) : grammar.status());
  });
  return call;
}

grpc::ServerUnaryReactor* PrefillCore::RevokeTicket(grpc::CallbackServerContext* context,
                                                    const v1::RevokeTicketRequest* request) {
  auto* const reactor = context->DefaultReactor();
  const absl::StatusOr<RandomId> id = RandomId::FromBytes(request->ticket_id());
  absl::Status refused = id.status();
  if (refused.ok() && request->epoch() != options_.epoch)
    refused = Errorf(absl::StatusCode::kFailedPrecondition,
                     "this is epoch {} of worker '{}', the ticket was given to {}: what that one wrote is "
                     "not known here",
                     options_.epoch, options_.worker_id, request->epoch());
  if (!refused.ok()) {
    reactor->Finish(ToGrpcStatus(refused));
    return reactor;
  }
  tickets_.Revoke(*id, std::chrono::milliseconds(request->ttl_ms()),
                  [reactor](const absl::Status& status) { reactor->Finish(ToGrpcStatus(status)); });
  engine_.Wake();  // cancelled work ends at once
  return reactor;
}

absl::Status PrefillCore::CheckTicket(const v1::PrefillRequest& request, const Peer& peer,
                                      const engine::PrefillRequest& prefill,
                                      const engine::StreamClasses* classes) const {
  const v1::Ticket& ticket = request.ticket();
  if (!ticket.in_place()) {
    const bool reuses = !request.segments().empty() || request.reuse().auto_segments();
    if (ticket.held_tokens() > 0 &&
        methods::ResolvePolicy(prefill.reuse.policy, reuses, methods::kSparseX) != methods::kExact)
      return InvalidArgument("the ticket holds {} tokens, and the reuse policy '{}' is not exact", ticket.held_tokens(),
                             prefill.reuse.policy);
    SPLICE_RETURN_IF_ERROR(CheckHeldTokens(ticket, engine_.model(), prefill.namespace_key, prefill.tokens));
    return ValidateTicket(ticket, peer.endpoint, engine_.model(), request.token_ids_size(), classes);
  }
  if (options_.shared == nullptr || ticket.page_ids_size() > 0)
    return InvalidArgument("the ticket of '{}' is in place and has {} pages; this worker {} pool with it",
                           ticket.worker_id(), ticket.page_ids_size(),
                           options_.shared == nullptr ? "shares no" : "shares its");
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<PromptDelivery>> PrefillCore::MakeDelivery(
    const v1::PrefillRequest& request, std::shared_ptr<const Peer> peer,
    std::shared_ptr<const engine::StreamClasses> classes, std::unique_ptr<TicketGuard::Hold> hold) {
  if (request.ticket().in_place())
    return std::make_shared<InPlaceDelivery>(pushes_, std::move(peer), request.ticket(), options_.shared,
                                             std::move(hold), request.request_id());
  return KvPush::Create(pushes_, std::move(peer), request.ticket(), engine_.model(), std::move(classes),
                        std::move(hold), request.request_id());
}

absl::Status PrefillCore::Start(RunCall& call, std::shared_ptr<const grammar::TokenGrammar> grammar) {
  const v1::PrefillRequest& request = *call.request;
  SPLICE_RETURN_IF_ERROR(run_fault.Hit().status);
  // First, so that a RevokeTicket gets its answer whatever happens below.
  SPLICE_ASSIGN_OR_RETURN(const RandomId ticket_id, RandomId::FromBytes(request.ticket().ticket_id()));
  SPLICE_ASSIGN_OR_RETURN(auto hold, tickets_.Begin(ticket_id, call.cancelled));
  SPLICE_ASSIGN_OR_RETURN(const auto peer, peers_.Find(request.ticket().worker_id(), request.ticket().epoch()));
  if (request.ticket().channel_id() != 0 && request.ticket().channel_id() != peer->channel_id)
    return Errorf(absl::StatusCode::kUnavailable, "the ticket was reserved for an earlier KV connection to '{}'",
                  request.ticket().worker_id());
  engine::PrefillRequest prefill;
  prefill.id = request.request_id();
  prefill.tokens.assign(request.token_ids().begin(), request.token_ids().end());
  prefill.reuse = wire::FromProto(request.reuse());
  SPLICE_ASSIGN_OR_RETURN(prefill.namespace_key, wire::DigestFromBytes(request.namespace_key(), "namespace_key"));
  SPLICE_ASSIGN_OR_RETURN(const auto classes, wire::DecodeClassesOf(prefill.reuse, engine_.model()));
  if (absl::Status status = CheckTicket(request, *peer, prefill, classes.get()); !status.ok()) {
    tickets_invalid_.Increment();
    return status;
  }
  if (absl::Status status = hold->Use(); !status.ok()) {
    tickets_replayed_.Increment();
    return status;
  }
  prefill.sampling = SamplingOf(request, std::move(grammar));
  SPLICE_RETURN_IF_ERROR(TakeFields(request, prefill));
  SPLICE_ASSIGN_OR_RETURN(prefill.segments, wire::FromProto(request.segments()));
  SPLICE_ASSIGN_OR_RETURN(const auto token_selector, engine::MakeTokenSelector(wire::DecodeOptionsOf(request.reuse()),
                                                                               engine_.model().config(), classes));
  if (!request.session_owner().empty()) {
    SPLICE_ASSIGN_OR_RETURN(prefill.session_owner, wire::DigestFromBytes(request.session_owner(), "session_owner"));
  }
  prefill.max_computed_tokens = options_.max_computed_tokens;
  prefill.deadline = FromGrpcDeadline(call.context->deadline());
  prefill.cancelled = call.cancelled;
  SPLICE_ASSIGN_OR_RETURN(const auto push, MakeDelivery(request, peer, classes, std::move(hold)));
  prefill.continues_here = request.ticket().in_place();
  if (!prefill.continues_here) push->FollowLayers(prefill);
  push->SetTrace(tracer_, call.span.context());
  const TraceContext fetch_trace = tracer_.MakeChild(call.span.context());
  prefill.fetch_trace = fetch_trace;
  prefill.on_done = [this, push, &call, fetch_trace, num_top = prefill.prompt_logprobs,
                     selector = request.ticket().decode_selector().empty() ? std::string(token_selector->name())
                                                                           : request.ticket().decode_selector()](
                        const absl::Status& status, engine::PrefillOutcome outcome) {
    if (!status.ok()) {
      push->Abort(std::move(outcome.kv), status, [&call, status] { call.End(status); });
      return;
    }
    push->Commit(outcome);  // before anything is written down: a step may be waiting for the sequence
    Count(outcome.stats);
    TraceStages(call.span.context(), fetch_trace, outcome.stats);
    v1::Receipt& receipt = *call.response->mutable_receipt();
    FillReceipt(outcome, receipt);
    // Another selector chooses among what is kept.
    receipt.set_decode_selector(outcome.kept != nullptr && selector == methods::kDense ? "kept_tokens" : selector);
    receipt.set_prefill_worker(options_.worker_id);
    FillDelivery(*push, call.request->ticket(), receipt);
    for (const engine::SampledToken& token : outcome.first_tokens)
      *call.response->add_first_tokens() = wire::ToProto(token);
    FillPromptLogprobs(outcome.prompt_logprobs, num_top, *call.response);
    receipt.set_bytes_moved(static_cast<uint64_t>(push->num_bytes()));
    call.response->set_run_seconds(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - call.arrived).count());
    call.End(absl::OkStatus());  // the first token does not wait for the commit
  };
  fidelity_.Watch(prefill);
  absl::Status status = engine_.Submit(std::move(prefill));
  if (!status.ok()) pushes_.PushEnded();  // nothing was pushed, nothing is to be undone
  return status;
}

// Records the engine's work for a prompt as spans.
void PrefillCore::TraceStages(const TraceContext& run, const TraceContext& fetch,
                              const engine::PrefillStats& stats) const {
  if (!tracer_.Records(run)) return;
  const auto record = [&](const TraceContext& own, std::string_view name, engine::SteadyTime start,
                          std::optional<double> seconds, std::vector<std::pair<std::string, SpanValue>> attributes) {
    const auto now = std::chrono::steady_clock::now();
    const auto length =
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds.value_or(0)));
    tracer_.Record(own, run,
                   {.name = name,
                    .start = start,
                    .end = seconds.has_value() ? start + length : now,
                    .attributes = std::move(attributes)});
  };
  const auto child = [&] { return tracer_.MakeChild(run); };
  const auto waited = std::chrono::duration<double>(stats.looked_up - stats.submitted).count();
  record(child(), "prefill.queue", stats.submitted, waited, {});
  record(child(), "prefill.match", stats.looked_up, stats.lookup_s, {{"splice.cached_tokens", stats.cached_tokens}});
  if (stats.fetched != engine::SteadyTime{})
    record(fetch, "prefill.fetch", stats.fetched, stats.fetch_s, {{"splice.bytes", stats.fetched_bytes}});
  record(child(), "prefill.compute", stats.started, std::nullopt,
         {{"splice.computed_tokens", stats.computed_tokens},
          {"splice.aligned_tokens", stats.aligned_tokens},
          {"splice.reuse", stats.policy}});
}

void PrefillCore::CountChoice(const engine::MethodChoice& choice) {
  if (choice.why == engine::ChoiceReason::kNamed) return;
  metrics_
      .Counter("splice_prefill_choices_total", "Prompts whose method was chosen, by the method and the reason.",
               {{"method", choice.policy}, {"why", std::string(engine::NameOf(choice.why))}})
      .Increment();
}

void PrefillCore::Count(const engine::PrefillStats& stats) {
  CountChoice(stats.choice);
  prompt_tokens_.Increment(static_cast<double>(stats.prompt_tokens));
  reused_prefix_.Increment(static_cast<double>(stats.cached_tokens - stats.session_tokens));
  reused_session_.Increment(static_cast<double>(stats.session_tokens));
  reused_segment_.Increment(static_cast<double>(stats.aligned_tokens));
  recomputed_.Increment(static_cast<double>(stats.recomputed_tokens));
  copied_same_.Increment(static_cast<double>(stats.copied.same_context));
  copied_isolated_.Increment(static_cast<double>(stats.copied.isolated));
  copied_foreign_.Increment(static_cast<double>(stats.copied.foreign));
  reused_miss_.Increment(static_cast<double>(stats.computed_tokens));
  fetched_bytes_.Increment(static_cast<double>(stats.fetched_bytes));
  const auto skipped = static_cast<double>(stats.skipped_tokens);
  if (stats.store_use == engine::StoreUse::kSlower) skipped_slower_.Increment(skipped);
  if (stats.store_use == engine::StoreUse::kLate) skipped_late_.Increment(skipped);
  if (stats.store_use == engine::StoreUse::kShared) skipped_shared_.Increment(skipped);
  if (stats.lines.heads > 0) {
    line_prompts_.Increment();
    line_heads_.Increment(static_cast<double>(stats.lines.heads - stats.lines.dense_heads));
    line_dense_heads_.Increment(static_cast<double>(stats.lines.dense_heads));
    line_covered_.Observe(stats.lines.covered_share());
    line_cells_.Observe(stats.lines.cell_share());
    line_held_out_.Observe(stats.lines.held_out_share());
  }
  stage_queue_.Observe(stats.queue_s);
  stage_lookup_.Observe(stats.lookup_s);
  stage_fetch_.Observe(stats.fetch_s);
  stage_prefill_.Observe(stats.prefill_s);
}

}  // namespace spl::prefill
