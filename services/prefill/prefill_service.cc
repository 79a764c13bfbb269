#include "services/prefill/prefill_service.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "services/base/clock.h"
#include "services/base/fault_point.h"
#include "services/base/grpc_status.h"
#include "services/base/grpc_trace.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/chunk/remote/chunk_wire.h"
#include "services/prefill/head_push.h"
#include "services/wire/convert.h"
#include "services/wire/ticket_metrics.h"
#include "services/wire/version.h"

namespace spl::prefill {
namespace {

FaultPoint run_fault("prefill.run");
constexpr size_t kMaxProbeKeys = 16384;
constexpr std::chrono::milliseconds kRetryAfter{200};
// No write of a fetch starts this close to the end of its time.
constexpr std::chrono::milliseconds kFetchMargin{1000};

grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const absl::Status& status) {
  auto* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

void RaiseTo(prometheus::Counter& counter, uint64_t value) {
  const double missing = static_cast<double>(value) - counter.Value();
  if (missing > 0) counter.Increment(missing);
}

prometheus::Counter& CanonicalCounter(Metrics& metrics, const char* result) {
  return metrics.Counter("splice_prefill_canonical_segments_total",
                         "Segments to be computed by themselves in the background, by what became of them.",
                         {{"result", result}});
}

prometheus::Counter& LeaseCounter(Metrics& metrics, const char* result) {
  return metrics.Counter(
      "splice_prefill_head_leases_total",
      "Leases on what decode workers leave out of local heads, by what became of the request for one.",
      {{"result", result}});
}

prometheus::Counter& LineCounter(Metrics& metrics, const char* kind) {
  return metrics.Counter("splice_prefill_line_heads_total",
                         "KV heads times layers that chose lines, by whether they fell back to everything.",
                         {{"kind", kind}});
}

// Shares near 1 are what a method promises, small ones what it saves.
std::vector<double> ShareBuckets() { return {.02, .05, .1, .2, .3, .5, .7, .8, .9, .95, .98, .99, .995, .999, 1}; }

prometheus::Counter& SessionsCounter(Metrics& metrics, const char* reason) {
  return metrics.Counter("splice_prefill_sessions_dropped_total",
                         "Conversations whose KV went: for want of pages, or because their lease was over.",
                         {{"reason", reason}});
}

prometheus::Histogram& StageHistogram(Metrics& metrics, const char* stage) {
  return metrics.Histogram(metric::kTtftStageSeconds, "Where the time to the first token goes.", buckets::Stage(),
                           {{"stage", stage}});
}

void FillLines(const engine::LineReport& lines, v1::LineReceipt& receipt) {
  receipt.set_heads(static_cast<uint64_t>(lines.heads));
  receipt.set_dense_heads(static_cast<uint64_t>(lines.dense_heads));
  receipt.set_covered(lines.covered_share());
  receipt.set_cells(lines.cell_share());
  receipt.set_held_out(lines.held_out_share());
  receipt.set_held_out_lowest(lines.held_out_lowest);
}

void FillReceipt(const engine::PrefillStats& stats, v1::Receipt& receipt) {
  receipt.set_reuse_policy(stats.policy);
  receipt.set_exact(stats.exact);
  receipt.set_prompt_tokens(static_cast<uint32_t>(stats.prompt_tokens));
  receipt.set_cached_tokens(static_cast<uint32_t>(stats.cached_tokens));
  receipt.set_session_tokens(static_cast<uint32_t>(stats.session_tokens));
  receipt.set_stored_tokens(static_cast<uint32_t>(stats.stored_tokens));
  receipt.set_aligned_tokens(static_cast<uint32_t>(stats.aligned_tokens));
  receipt.set_recomputed_tokens(static_cast<uint32_t>(stats.recomputed_tokens));
  receipt.set_computed_tokens(static_cast<uint32_t>(stats.computed_tokens));
  receipt.set_restored_heads(static_cast<uint32_t>(stats.restored_heads));
  receipt.set_ffn_share(stats.ffn_share);
  receipt.set_kept_share(stats.kept_share);
  receipt.set_summaries_computed(static_cast<uint32_t>(stats.summaries_computed));
  if (stats.lines.heads > 0) FillLines(stats.lines, *receipt.mutable_lines());
  receipt.set_bytes_fetched(static_cast<uint64_t>(stats.fetched_bytes));
  receipt.set_queue_seconds(stats.queue_s);
  receipt.set_lookup_seconds(stats.lookup_s);
  receipt.set_fetch_seconds(stats.fetch_s);
  receipt.set_prefill_seconds(stats.prefill_s);
}

}  // namespace

// One Run or Publish call. Lives until gRPC is done with it, which is after Finish; Finish is called exactly once, by
// the engine's on_done (of a Run through the push when there is something to undo) or when it is refused at once.
template <typename Request, typename Response>
class PrefillService::EngineCall final : public grpc::ServerUnaryReactor {
 public:
  EngineCall(PrefillService& service, grpc::CallbackServerContext* context, const Request* request, Response* response)
      : service(service),
        context(context),
        request(request),
        response(response),
        span(service.tracer_, std::is_same_v<Request, v1::PrefillRequest> ? "prefill.run" : "prefill.publish",
             AcceptTrace(service.tracer_, *context), SpanKind::kServer) {
    span.Set("splice.request", request->request_id());
    span.Set("splice.worker", service.worker_id_);
  }

  // Instead of Finish.
  void End(const absl::Status& status) {
    span.SetStatus(status);
    span.End();
    this->Finish(ToGrpcStatus(status));
  }

  void OnCancel() override {
    cancelled->store(true);
    service.engine_.Wake();
  }
  void OnDone() override { delete this; }

  PrefillService& service;
  grpc::CallbackServerContext* const context;
  const Request* const request;
  Response* const response;
  const engine::CancelFlag cancelled = std::make_shared<std::atomic<bool>>(false);
  Span span;
  const std::chrono::steady_clock::time_point arrived = std::chrono::steady_clock::now();
};

PrefillService::PrefillService(engine::PrefillEngine& engine, PeerTable& peers, PushWorker& pushes,
                               TicketGuard& tickets, HeadLeaseTable& leases, CacheStreams& cache_streams,
                               std::string worker_id, uint64_t epoch, double fidelity_share, Metrics& metrics,
                               const Tracer& tracer)
    : engine_(engine),
      peers_(peers),
      pushes_(pushes),
      tickets_(tickets),
      leases_(leases),
      cache_streams_(cache_streams),
      worker_id_(std::move(worker_id)),
      epoch_(epoch),
      tracer_(tracer),
      fidelity_(engine, fidelity_share, metrics),
      waiting_(metrics.Gauge(metric::kNumRequestsWaiting, "Prompts queued or being computed.")),
      kv_usage_(metrics.Gauge(metric::kKvCacheUsagePerc, "Share of KV pages in use, 0 to 1.")),
      pages_used_(metrics.Gauge("splice_kv_pages_used", "KV pages that are not free, cached prefixes included.")),
      tickets_revoked_(metrics.Gauge("splice_prefill_tickets_revoked",
                                     "Given-up tickets that are remembered: a call that comes late is refused.")),
      late_runs_(metrics.Counter("splice_prefill_late_runs_total",
                                 "Calls that came after their ticket had been revoked, and were refused.")),
      tickets_invalid_(wire::RefusedTicketsCounter(metrics, "invalid")),
      tickets_replayed_(wire::RefusedTicketsCounter(metrics, "replayed")),
      frozen_sources_(metrics.Gauge("splice_prefill_frozen_sources", "Segments of knowledge bases in local pages.")),
      frozen_tokens_(metrics.Gauge("splice_prefill_frozen_tokens", "Tokens of these segments.")),
      frozen_dropped_(metrics.Counter("splice_prefill_frozen_dropped_total",
                                      "Segments of knowledge bases that had to make room; the store keeps them.")),
      canonical_queued_(metrics.Gauge("splice_prefill_canonical_queued",
                                      "Segments without a source that wait to be computed while nothing else is.")),
      canonical_computed_(CanonicalCounter(metrics, "computed")),
      canonical_cancelled_(CanonicalCounter(metrics, "cancelled")),
      canonical_dropped_(CanonicalCounter(metrics, "dropped")),
      canonical_tokens_(metrics.Counter("splice_prefill_canonical_tokens_total",
                                        "Tokens of segments that were computed by themselves in the background.")),
      leased_bytes_(metrics.Gauge("splice_prefill_head_lease_bytes", "KV pages under lease for decode workers.")),
      leases_given_(LeaseCounter(metrics, "given")),
      leases_denied_(LeaseCounter(metrics, "denied")),
      leases_expired_(LeaseCounter(metrics, "expired")),
      leases_reclaimed_(LeaseCounter(metrics, "reclaimed")),
      heads_sent_(metrics.Counter("splice_prefill_heads_fetched_total", "Heads that decode workers fetched.")),
      sessions_(metrics.Gauge("splice_prefill_sessions", "Conversations whose KV is kept for their next turn.")),
      session_pages_(metrics.Gauge("splice_prefill_session_pages", "KV pages that they keep.")),
      sessions_evicted_(SessionsCounter(metrics, "evicted")),
      sessions_expired_(SessionsCounter(metrics, "expired")),
      prompt_tokens_(metrics.Counter(metric::kPromptTokensTotal, "Prompt tokens of finished prefills.")),
      reused_prefix_(
          metrics.Counter(metric::kReuseTokensTotal, "Prompt tokens by what was done.", {{"kind", "prefix"}})),
      reused_session_(
          metrics.Counter(metric::kReuseTokensTotal, "Prompt tokens by what was done.", {{"kind", "session"}})),
      reused_segment_(
          metrics.Counter(metric::kReuseTokensTotal, "Prompt tokens by what was done.", {{"kind", "segment"}})),
      recomputed_(metrics.Counter("splice_recomputed_tokens_total",
                                  "Tokens of segments that were computed afresh above the dense layers.")),
      reused_miss_(metrics.Counter(metric::kReuseTokensTotal, "Prompt tokens by what was done.", {{"kind", "miss"}})),
      fetched_bytes_(metrics.Counter("splice_store_fetched_bytes_total", "KV bytes read from the chunk store.")),
      published_new_(metrics.Counter("splice_prefill_published_chunks_total", "Chunks that Publish calls stored.",
                                     {{"result", "stored"}})),
      published_existing_(metrics.Counter("splice_prefill_published_chunks_total", "Chunks that Publish calls stored.",
                                          {{"result", "existing"}})),
      published_bytes_(
          metrics.Counter("splice_prefill_published_bytes_total", "Payloads of the chunks of Publish calls.")),
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

void PrefillService::set_grpc_address(const std::string& address) {
  std::lock_guard lock(address_mutex_);
  grpc_address_ = address;
}

void PrefillService::UpdateGauges() {
  if (leases_.Expire()) engine_.Wake();
  const HeadLeaseTable::Stats leases = leases_.stats();
  leased_bytes_.Set(static_cast<double>(leases.bytes));
  RaiseTo(leases_given_, leases.num_given);
  RaiseTo(leases_denied_, leases.num_denied);
  RaiseTo(leases_expired_, leases.num_expired);
  RaiseTo(leases_reclaimed_, leases.num_reclaimed);
  const engine::PagePool& pool = engine_.pool();
  const double used = static_cast<double>(pool.num_pages() - pool.num_free());
  waiting_.Set(static_cast<double>(engine_.load().queued_requests));
  kv_usage_.Set(used / static_cast<double>(std::max<int64_t>(1, pool.num_pages())));
  pages_used_.Set(used);
  const TicketGuard::Stats tickets = tickets_.stats();
  tickets_revoked_.Set(static_cast<double>(tickets.num_revoked));
  RaiseTo(late_runs_, tickets.num_refused);
  const engine::SegmentIndex::Stats segments = engine_.segment_stats();
  frozen_sources_.Set(static_cast<double>(segments.num_frozen));
  frozen_tokens_.Set(static_cast<double>(segments.frozen_tokens));
  RaiseTo(frozen_dropped_, segments.num_frozen_dropped);
  const engine::CanonicalStats canonical = engine_.canonical_stats();
  canonical_queued_.Set(static_cast<double>(canonical.num_queued));
  RaiseTo(canonical_computed_, canonical.num_computed);
  RaiseTo(canonical_cancelled_, canonical.num_cancelled);
  RaiseTo(canonical_dropped_, canonical.num_dropped);
  RaiseTo(canonical_tokens_, canonical.num_tokens);
  const engine::SessionTable::Stats sessions = engine_.session_stats();
  sessions_.Set(static_cast<double>(sessions.num_sessions));
  session_pages_.Set(static_cast<double>(sessions.num_pages));
  RaiseTo(sessions_evicted_, sessions.num_evicted);
  RaiseTo(sessions_expired_, sessions.num_expired);
}

grpc::ServerUnaryReactor* PrefillService::SetDraining(grpc::CallbackServerContext* context,
                                                      const v1::SetDrainingRequest* request, v1::SetDrainingResponse*) {
  draining_by_operator_ = request->draining();
  log::Info("prefill.draining", log::F("on", request->draining()));
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* PrefillService::GetInfo(grpc::CallbackServerContext* context,
                                                  const v1::GetPrefillInfoRequest* request, v1::PrefillInfo* response) {
  if (static_cast<size_t>(request->probe_keys_size()) > kMaxProbeKeys)
    return Answer(context,
                  InvalidArgument("probe_keys has {} keys, at most {}", request->probe_keys_size(), kMaxProbeKeys));
  const engine::PrefillLoad load = engine_.load();
  response->set_worker_id(worker_id_);
  response->set_epoch(epoch_);
  *response->mutable_model() = wire::IdentityOf(engine_.model());
  response->set_queued_requests(static_cast<uint32_t>(load.queued_requests));
  response->set_queued_tokens(static_cast<uint64_t>(std::max<int64_t>(0, load.queued_tokens)));
  response->set_prefill_tokens_per_s(load.tokens_per_s);
  response->set_free_pages(static_cast<uint64_t>(engine_.pool().num_free()));
  response->set_total_pages(static_cast<uint64_t>(engine_.pool().num_pages()));
  response->set_max_prompt_tokens(static_cast<uint64_t>(engine_.max_prompt_tokens()));
  response->set_draining(draining());
  response->set_unix_nanos(UnixNanos());
  *response->mutable_wire() = wire::OwnVersions();
  for (const std::string& id : peers_.ConnectedIds()) response->add_connected_peers(id);
  std::vector<chunk::ChunkKey> keys;
  for (const std::string& bytes : request->probe_keys()) {
    const auto digest = wire::DigestFromBytes(bytes, "probe_keys");
    if (!digest.ok()) return Answer(context, digest.status());
    keys.push_back({*digest});
  }
  response->set_probed_tokens(static_cast<uint32_t>(engine_.CountCachedLeading(keys) * chunk::kChunkTokens));
  return Answer(context, absl::OkStatus());
}

grpc::ServerWriteReactor<v1::CacheEvents>* PrefillService::WatchCache(grpc::CallbackServerContext*,
                                                                      const v1::WatchCacheRequest* request) {
  return cache_streams_.Open(*request);
}

grpc::ServerUnaryReactor* PrefillService::ConnectPeer(grpc::CallbackServerContext* context,
                                                      const v1::ConnectPeerRequest* request,
                                                      v1::ConnectPeerResponse* response) {
  auto* reactor = context->DefaultReactor();
  const auto done = [reactor, response](const absl::StatusOr<std::shared_ptr<const Peer>>& peer) {
    if (peer.ok()) {
      response->set_transport((*peer)->carrier());
      response->set_bytes_per_s((*peer)->bytes_per_s);
      response->set_write_seconds((*peer)->write_s);
    }
    reactor->Finish(ToGrpcStatus(peer.status()));
  };
  if (const absl::Status status = peers_.Connect(request->endpoint(), done); !status.ok())
    reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

template <typename Call>
Call* PrefillService::Begin(Call* call, absl::Status (PrefillService::*start)(Call&)) {
  const absl::Status status =
      draining() ? absl::UnavailableError("the prefill worker is draining") : (this->*start)(*call);
  if (status.ok()) return call;
  if (status.code() == absl::StatusCode::kResourceExhausted) SetRetryAfter(*call->context, kRetryAfter);
  call->End(status);
  return call;
}

grpc::ServerUnaryReactor* PrefillService::Run(grpc::CallbackServerContext* context, const v1::PrefillRequest* request,
                                              v1::PrefillResponse* response) {
  return Begin(new RunCall(*this, context, request, response), &PrefillService::StartRun);
}

grpc::ServerUnaryReactor* PrefillService::RevokeTicket(grpc::CallbackServerContext* context,
                                                       const v1::RevokeTicketRequest* request,
                                                       v1::RevokeTicketResponse*) {
  const absl::StatusOr<RandomId> id = RandomId::FromBytes(request->ticket_id());
  if (!id.ok()) return Answer(context, id.status());
  if (request->epoch() != epoch_)
    return Answer(context, Errorf(absl::StatusCode::kFailedPrecondition,
                                  "this is epoch {} of worker '{}', the ticket was given to {}: what that one wrote is "
                                  "not known here",
                                  epoch_, worker_id_, request->epoch()));
  auto* reactor = context->DefaultReactor();
  tickets_.Revoke(*id, std::chrono::milliseconds(request->ttl_ms()),
                  [reactor](const absl::Status& status) { reactor->Finish(ToGrpcStatus(status)); });
  engine_.Wake();  // what was cancelled ends at once
  return reactor;
}

grpc::ServerUnaryReactor* PrefillService::Publish(grpc::CallbackServerContext* context,
                                                  const v1::PublishRequest* request, v1::PublishResponse* response) {
  return Begin(new PublishCall(*this, context, request, response), &PrefillService::StartPublish);
}

absl::Status PrefillService::StartPublish(PublishCall& call) {
  const v1::PublishRequest& request = *call.request;
  engine::PublishRequest publish;
  publish.id = request.request_id();
  publish.tokens.assign(request.token_ids().begin(), request.token_ids().end());
  SPLICE_ASSIGN_OR_RETURN(publish.segments, wire::FromProto(request.segments()));
  SPLICE_ASSIGN_OR_RETURN(publish.put.pin, chunk::PinFromWire(request.pin()));
  publish.put.durable = request.durable();
  publish.deadline = FromGrpcDeadline(call.context->deadline());
  publish.cancelled = call.cancelled;
  publish.on_done = [this, &call](const absl::Status& status, const engine::PublishOutcome& outcome) {
    published_new_.Increment(static_cast<double>(outcome.stored.num_chunks - outcome.stored.num_existing));
    published_existing_.Increment(static_cast<double>(outcome.stored.num_existing));
    published_bytes_.Increment(static_cast<double>(outcome.stored.num_bytes));
    call.response->set_chunks(outcome.stored.num_chunks);
    call.response->set_existing_chunks(outcome.stored.num_existing);
    call.response->set_bytes(outcome.stored.num_bytes);
    call.response->set_computed_tokens(static_cast<uint64_t>(outcome.stats.computed_tokens));
    call.response->set_prefill_seconds(outcome.stats.prefill_s);
    call.End(status);
  };
  return engine_.Publish(std::move(publish));
}

// Null: there is nothing to keep, or no room for it.
std::unique_ptr<PushLease> PrefillService::GiveLease(const engine::PrefillOutcome& outcome,
                                                     const engine::StreamClasses& classes) {
  std::shared_ptr<const LeasedHeads> heads = LeasedHeads::Share(*outcome.kv, classes, outcome.restored_heads);
  if (heads == nullptr) return nullptr;
  const absl::StatusOr<RandomId> id = leases_.Give(heads);
  if (!id.ok()) return nullptr;  // counted there; the request goes on without
  auto lease = std::make_unique<PushLease>();
  lease->heads = std::move(heads);
  lease->lease.set_lease_id(id->ToBytes());
  lease->lease.set_ttl_ms(static_cast<uint32_t>(leases_.ttl().count()));
  lease->release = [this, id = *id] { leases_.Release(id); };
  std::lock_guard lock(address_mutex_);
  lease->lease.set_grpc_address(grpc_address_);
  return lease;
}

grpc::ServerUnaryReactor* PrefillService::FetchHeads(grpc::CallbackServerContext* context,
                                                     const v1::FetchHeadsRequest* request,
                                                     v1::FetchHeadsResponse* response) {
  auto* reactor = context->DefaultReactor();
  const auto done = [this, reactor, request, response](const absl::StatusOr<std::vector<uint32_t>>& crcs) {
    if (crcs.ok()) {
      response->mutable_crc32c()->Assign(crcs->begin(), crcs->end());
      heads_sent_.Increment(request->heads_size());
    }
    reactor->Finish(ToGrpcStatus(crcs.status()));
  };
  if (const absl::Status status = DoFetchHeads(*request, done); !status.ok()) reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

absl::Status PrefillService::DoFetchHeads(const v1::FetchHeadsRequest& request,
                                          std::function<void(absl::StatusOr<std::vector<uint32_t>>)> done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(request.ttl_ms()) - kFetchMargin;
  SPLICE_ASSIGN_OR_RETURN(const RandomId id, RandomId::FromBytes(request.lease_id()));
  SPLICE_ASSIGN_OR_RETURN(auto heads, leases_.Renew(id));
  auto peer = peers_.Find(request.worker_id(), request.epoch());
  // Nothing is on its way: not the Unavailable that says otherwise.
  if (!peer.ok()) return absl::FailedPreconditionError(MessageOf(peer.status()));
  return PushHeads(pushes_, *std::move(peer), std::move(heads), request, deadline, std::move(done));
}

grpc::ServerUnaryReactor* PrefillService::RenewHeadLease(grpc::CallbackServerContext* context,
                                                         const v1::RenewHeadLeaseRequest* request,
                                                         v1::RenewHeadLeaseResponse* response) {
  const absl::StatusOr<RandomId> id = RandomId::FromBytes(request->lease_id());
  if (!id.ok()) return Answer(context, id.status());
  response->set_ttl_ms(static_cast<uint32_t>(leases_.ttl().count()));
  return Answer(context, leases_.Renew(*id).status());
}

grpc::ServerUnaryReactor* PrefillService::ReleaseHeadLease(grpc::CallbackServerContext* context,
                                                           const v1::ReleaseHeadLeaseRequest* request,
                                                           v1::ReleaseHeadLeaseResponse*) {
  const absl::StatusOr<RandomId> id = RandomId::FromBytes(request->lease_id());
  if (!id.ok()) return Answer(context, id.status());
  leases_.Release(*id);
  engine_.Wake();
  return Answer(context, absl::OkStatus());
}

absl::Status PrefillService::StartRun(RunCall& call) {
  const v1::PrefillRequest& request = *call.request;
  SPLICE_RETURN_IF_ERROR(run_fault.Hit().status);
  // First: whatever happens below, nobody asks in vain whether something is being written.
  SPLICE_ASSIGN_OR_RETURN(const RandomId ticket_id, RandomId::FromBytes(request.ticket().ticket_id()));
  SPLICE_ASSIGN_OR_RETURN(auto hold, tickets_.Begin(ticket_id, call.cancelled));
  SPLICE_ASSIGN_OR_RETURN(const auto peer, peers_.Find(request.ticket().worker_id(), request.ticket().epoch()));
  engine::PrefillRequest prefill;
  prefill.id = request.request_id();
  prefill.tokens.assign(request.token_ids().begin(), request.token_ids().end());
  SPLICE_ASSIGN_OR_RETURN(const auto classes, wire::DecodeClassesOf(wire::FromProto(request.reuse()), engine_.model()));
  if (const absl::Status status = ValidateTicket(request.ticket(), peer->endpoint, engine_.model(),
                                                 static_cast<int64_t>(prefill.tokens.size()), classes.get());
      !status.ok()) {
    tickets_invalid_.Increment();
    return status;
  }
  if (const absl::Status status = hold->Use(); !status.ok()) {
    tickets_replayed_.Increment();
    return status;
  }
  prefill.num_output_tokens = request.num_output_tokens();
  prefill.sampling = wire::FromProto(request.sampling());
  prefill.reuse = wire::FromProto(request.reuse());
  prefill.reuse_auto = request.reuse().auto_segments();
  prefill.publish = !request.reuse().has_publish() || request.reuse().publish();
  prefill.return_first_logits = request.reuse().return_first_logits();
  SPLICE_ASSIGN_OR_RETURN(prefill.segments, wire::FromProto(request.segments()));
  SPLICE_ASSIGN_OR_RETURN(const auto token_selector, engine::MakeTokenSelector(wire::DecodeOptionsOf(request.reuse()),
                                                                               engine_.model().config(), classes));
  const engine::HeadRestoreOptions restore = wire::HeadRestoreOptionsOf(request.reuse());
  if (restore.enabled && classes != nullptr)
    SPLICE_RETURN_IF_ERROR(engine::CheckHeadRestore(restore, *token_selector, engine_.model()));
  prefill.session = request.session();
  SPLICE_ASSIGN_OR_RETURN(prefill.namespace_key, wire::DigestFromBytes(request.namespace_key(), "namespace_key"));
  prefill.deadline = FromGrpcDeadline(call.context->deadline());
  prefill.cancelled = call.cancelled;
  SPLICE_ASSIGN_OR_RETURN(auto push, KvPush::Create(pushes_, peer, request.ticket(), engine_.model(), classes,
                                                    std::move(hold), prefill.id));
  prefill.on_layer = [push](const engine::LayerReady& ready) { push->OnLayer(ready); };
  const bool keeps_heads = restore.enabled && classes != nullptr;
  push->SetTrace(tracer_, call.span.context());
  const TraceContext fetch_trace = tracer_.MakeChild(call.span.context());
  prefill.fetch_trace = fetch_trace;
  prefill.on_done = [this, push, &call, keeps_heads, classes, fetch_trace,
                     selector = std::string(token_selector->name())](const absl::Status& status,
                                                                     engine::PrefillOutcome outcome) {
    if (!status.ok()) {
      push->Abort(std::move(outcome.kv), status, [&call, status] { call.End(status); });
      return;
    }
    Count(outcome.stats);
    TraceStages(call.span.context(), fetch_trace, outcome.stats);
    v1::Receipt& receipt = *call.response->mutable_receipt();
    FillReceipt(outcome.stats, receipt);
    // Another selector chooses among what is kept.
    receipt.set_decode_selector(outcome.kept != nullptr && selector == "dense" ? "kept_tokens" : selector);
    receipt.set_prefill_worker(worker_id_);
    receipt.set_decode_worker(push->peer().endpoint.worker_id());
    receipt.set_transport(push->peer().carrier());
    receipt.set_first_logits(outcome.first_logits.data(), outcome.first_logits.size() * sizeof(float));
    for (const engine::SampledToken& token : outcome.first_tokens)
      *call.response->add_first_tokens() = wire::ToProto(token);
    std::unique_ptr<PushLease> lease = keeps_heads ? GiveLease(outcome, *classes) : nullptr;
    receipt.set_head_lease(lease != nullptr);
    push->Commit(std::move(outcome.kv), outcome.first_tokens, outcome.restored_heads, outcome.kept.get(),
                 std::move(lease));
    receipt.set_bytes_moved(static_cast<uint64_t>(push->num_bytes()));
    call.response->set_run_seconds(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - call.arrived).count());
    call.End(absl::OkStatus());  // the first token does not wait for the commit
  };
  fidelity_.Watch(prefill);
  const absl::Status status = engine_.Submit(std::move(prefill));
  if (!status.ok()) pushes_.PushEnded();  // nothing was pushed, nothing is to be undone
  return status;
}

// What the engine did for a prompt, as spans.
void PrefillService::TraceStages(const TraceContext& run, const TraceContext& fetch,
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

void PrefillService::Count(const engine::PrefillStats& stats) {
  prompt_tokens_.Increment(static_cast<double>(stats.prompt_tokens));
  reused_prefix_.Increment(static_cast<double>(stats.cached_tokens - stats.session_tokens));
  reused_session_.Increment(static_cast<double>(stats.session_tokens));
  reused_segment_.Increment(static_cast<double>(stats.aligned_tokens));
  recomputed_.Increment(static_cast<double>(stats.recomputed_tokens));
  reused_miss_.Increment(static_cast<double>(stats.computed_tokens));
  fetched_bytes_.Increment(static_cast<double>(stats.fetched_bytes));
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
