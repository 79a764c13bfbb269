#include "services/decode/decode_service.h"

#include <algorithm>

#include "services/base/clock.h"
#include "services/base/fault_point.h"
#include "services/base/grpc_status.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/base/thread_priority.h"
#include "services/base/version.h"
#include "services/decode/landing.h"
#include "services/decode/reservation.h"
#include "services/decode/reserve_call.h"
#include "services/decode/sequence_spans.h"
#include "services/engine/methods/selection_methods.h"
#include "services/wire/convert.h"
#include "services/wire/structured_output.h"
#include "services/wire/ticket_metrics.h"
#include "services/wire/unary_answer.h"
#include "services/wire/version.h"

namespace spl::decode {
namespace {

// Bytes of the pages that the sequence holds.
uint64_t HeldBytes(const engine::SequenceKv& kv, const engine::CompactPages* compact) {
  auto pages = static_cast<uint64_t>(kv.num_pages());
  if (compact != nullptr) {
    for (const std::vector<int32_t>& of_stream : compact->tables()) pages += of_stream.size();
  }
  return pages * kv.pool().view().page_bytes();
}

FaultPoint reserve_fault("decode.reserve");
constexpr std::chrono::milliseconds kIdleWait{200};

prometheus::Counter& HostRows(Metrics& metrics, const std::string& how) {
  return metrics.Counter("splice_decode_host_rows_total",
                         "Rows of KV in host memory that steps have listed, by whether the device had a copy.",
                         {{"rows", how}});
}

}  // namespace

DecodeService::DecodeService(engine::DecodeEngine& engine, const ReservationPools& pools,
                             const v1::DecodeEndpoint& endpoint, const DecodeServiceOptions& options, Metrics& metrics,
                             const Tracer& tracer)
    : tracer_(tracer),
      engine_(engine),
      pool_(pools.pool()),
      pools_(pools),
      options_(options),
      endpoint_(endpoint),
      fence_(options.transport, {.tls = options.tls}),
      tickets_(options.max_tickets, &fence_),
      landing_(options.max_tickets),
      running_(metrics.Gauge(metric::kNumRequestsRunning, "Sequences being decoded.")),
      waiting_(metrics.Gauge(metric::kNumRequestsWaiting, "Sequences reserved or waiting for a place in the batch.")),
      kv_usage_(metrics.Gauge(metric::kKvCacheUsagePerc, "Share of KV pages in use, 0 to 1.")),
      leases_(metrics.Gauge(metric::kKvLeasesOutstanding, "Tickets that a prefill worker may still write to.")),
      pages_used_(metrics.Gauge("splice_kv_pages_used", "KV pages that are neither free nor only cached.")),
      pages_cached_(metrics.Gauge("splice_decode_cached_pages",
                                  "KV pages of conversations and prefixes that give way to sequences.")),
      pages_quarantined_(
          metrics.Gauge("splice_kv_tickets_quarantined", "Given-up tickets whose writer is not known to be quiet.")),
      tickets_stuck_(metrics.Gauge("splice_kv_tickets_stuck",
                                   "Quarantined tickets whose writer neither answers nor can be cut off.")),
      writers_cut_(metrics.Counter("splice_kv_writers_cut_total",
                                   "KV connections torn down because their prefill worker did not answer.")),
      generated_tokens_(metrics.Counter(metric::kGenerationTokensTotal, "Tokens decoded.")),
      bytes_in_(metrics.Counter(metric::kKvTransferBytesTotal, "KV bytes transferred.", {{"direction", "in"}})),
      checksum_failures_(
          metrics.Counter(metric::kKvTransferFailuresTotal, "Transfers that failed.", {{"reason", "checksum"}})),
      expired_(metrics.Counter(metric::kKvLeasesExpiredTotal, "Tickets that expired before commit.")),
      preemptions_(metrics.Counter(metric::kNumPreemptionsTotal, "Sequences that gave way because the pool was full.")),
      parked_(metrics.Gauge("splice_decode_parked_sequences", "Sequences that gave way and wait for KV pages.")),
      parked_bytes_(metrics.Gauge("splice_decode_parked_bytes", "Host memory that holds their KV.")),
      host_kv_bytes_(
          metrics.Gauge("splice_decode_host_kv_bytes", "Host memory with KV of sequences that choose tokens.")),
      host_rows_found_(HostRows(metrics, "found")),
      host_rows_copied_(HostRows(metrics, "copied")),
      refused_unknown_(wire::RefusedTicketsCounter(metrics, "unknown")),
      refused_generation_(wire::RefusedTicketsCounter(metrics, "generation")),
      refused_replayed_(wire::RefusedTicketsCounter(metrics, "replayed")),
      chunks_(engine.step_costs(), metrics),
      decoded_densely_(metrics.Counter(
          "splice_decode_dense_fallbacks_total",
          "Requests that decode without a choice of tokens because the pages that it keeps did not fit.")) {
  tickets_.set_on_cancel([this] { engine_.Wake(); });
  landing_thread_ = std::thread([this] { LandingLoop(); });
}

DecodeService::~DecodeService() { Stop(); }

void DecodeService::Stop() {
  landing_.Close();
  if (landing_thread_.joinable()) landing_thread_.join();
  tickets_.Stop(absl::UnavailableError("the decode worker is stopping"));
  fence_.Stop();
}

void DecodeService::set_grpc_address(const std::string& address) {
  std::lock_guard lock(endpoint_mutex_);
  endpoint_.set_grpc_address(address);
}

void DecodeService::Drain(std::chrono::steady_clock::time_point deadline) {
  draining_ = true;
  tickets_.WaitIdle(deadline);
}

void DecodeService::UpdateGauges() {
  const engine::DecodeLoad load = engine_.load();
  const TicketCounts counts = tickets_.counts();
  const int64_t available = pool_.num_available();
  const double used = static_cast<double>(pool_.num_pages() - available);
  running_.Set(static_cast<double>(load.running));
  waiting_.Set(static_cast<double>(load.waiting + counts.reserved));
  kv_usage_.Set(used / static_cast<double>(std::max<int64_t>(1, pool_.num_pages())));
  pages_used_.Set(used);
  pages_cached_.Set(static_cast<double>(available - pool_.num_free()));
  leases_.Set(static_cast<double>(counts.reserved + counts.quarantined));
  pages_quarantined_.Set(static_cast<double>(counts.quarantined));
  tickets_stuck_.Set(static_cast<double>(counts.stuck));
  RaiseTo(writers_cut_, counts.cut_total);
  if (pools_.kept != nullptr) pools_.kept->UpdateGauges();
  parked_.Set(static_cast<double>(load.parked));
  parked_bytes_.Set(static_cast<double>(load.parked_bytes));
  host_kv_bytes_.Set(static_cast<double>(load.host_kv_bytes));
  RaiseTo(host_rows_found_, load.host_rows.listed - load.host_rows.copied);
  RaiseTo(host_rows_copied_, load.host_rows.copied);
  RaiseTo(preemptions_, load.preemptions);
  RaiseTo(expired_, counts.expired_total);
}

grpc::ServerUnaryReactor* DecodeService::SetDraining(grpc::CallbackServerContext* context,
                                                     const v1::SetDrainingRequest* request, v1::SetDrainingResponse*) {
  draining_by_operator_ = request->draining();
  log::Info("decode.draining", log::F("on", request->draining()));
  return wire::Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* DecodeService::GetInfo(grpc::CallbackServerContext* context, const v1::GetDecodeInfoRequest*,
                                                 v1::DecodeInfo* response) {
  context->AddInitialMetadata(wire::kProgramVersionKey, VersionWithCommit());
  const engine::DecodeLoad load = engine_.load();
  const engine::Model& model = engine_.model();
  const int64_t streams = engine::KvShapeOf(model.config()).num_streams();
  {
    std::lock_guard lock(endpoint_mutex_);
    *response->mutable_endpoint() = endpoint_;
  }
  response->set_worker_id(response->endpoint().worker_id());
  response->set_epoch(response->endpoint().epoch());
  *response->mutable_model() = wire::IdentityOf(model);
  response->set_running_sequences(static_cast<uint32_t>(load.running + load.waiting));
  response->set_reserved_tickets(static_cast<uint32_t>(tickets_.counts().reserved));
  response->set_free_pages(static_cast<uint64_t>(pool_.num_available()));
  response->set_total_pages(static_cast<uint64_t>(pool_.num_pages()));
  response->set_max_sequences(static_cast<uint32_t>(options_.max_sequences));
  response->set_step_seconds(load.step_s);
  response->set_draining(draining());
  response->set_replays(true);
  response->set_structured_output(options_.grammars != nullptr);
  response->set_unix_nanos(UnixNanos());
  *response->mutable_wire() = wire::OwnVersions();
  response->set_max_sequence_tokens(static_cast<uint64_t>(
      std::min<int64_t>(model.config().max_positions, pool_.num_pages() / streams * kernels::kPageTokens)));
  response->set_kv_bytes_per_token(static_cast<uint64_t>(streams) * model.page_bytes() / kernels::kPageTokens);
  if (const auto* local = local_prefill_.load(); local != nullptr) local->Describe(*response->mutable_local_prefill());
  return wire::Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* DecodeService::Reserve(grpc::CallbackServerContext* context,
                                                 const v1::ReserveRequest* request, v1::Ticket* response) {
  const auto call = std::make_shared<ReserveCall>(tracer_, *context, *response);
  wire::FindGrammar(options_.grammars.get(), request->sampling(), [=, this](grammar::CompiledGrammar grammar) {
    absl::Status status = reserve_fault.Hit().status;
    if (status.ok()) status = grammar.ok() ? DoReserve(*request, *std::move(grammar), *response) : grammar.status();
    call->End(status, engine_.load().step_s);
  });
  return call->reactor();
}

absl::Status DecodeService::DoReserve(const v1::ReserveRequest& request, Grammar grammar, v1::Ticket& response) {
  if (draining()) return absl::UnavailableError("the decode worker is draining");
  SPLICE_RETURN_IF_ERROR(wire::CheckFingerprint(request.model_fingerprint(), engine_.model()));
  // Sequences that were preempted come first: free pages are theirs.
  if (const size_t parked = engine_.load().parked; parked > 0)
    return Errorf(absl::StatusCode::kResourceExhausted, "{} sequences that gave way wait for KV pages", parked);
  SPLICE_ASSIGN_OR_RETURN(auto ticket, MakeReservation(request, engine_.model(), pools_, response));
  ticket->sampling.grammar = std::move(grammar);
  ticket->id = RandomId::Make();
  ticket->request_id = request.request_id();
  ticket->ttl = request.ttl_ms() == 0 ? options_.default_ttl
                                      : std::min(options_.max_ttl, std::chrono::milliseconds(request.ttl_ms()));
  ticket->writer = fence_.Note(request.writer(), ticket->ttl);
  response.set_channel_id(request.writer().channel_id());
  response.set_ticket_id(ticket->id.ToBytes());
  response.set_ttl_ms(static_cast<uint32_t>(ticket->ttl.count()));
  {
    std::lock_guard lock(endpoint_mutex_);
    response.set_worker_id(endpoint_.worker_id());
    response.set_epoch(endpoint_.epoch());
  }
  ticket->stream = std::make_shared<TokenStream>([this, id = ticket->id, cancelled = ticket->cancelled] {
    cancelled->store(true);
    engine_.Wake();
  });
  SPLICE_ASSIGN_OR_RETURN(const uint64_t generation, tickets_.Add(std::move(ticket)));
  response.set_generation(generation);
  if (!response.decode_selector().empty()) decoded_densely_.Increment();
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* DecodeService::Commit(grpc::CallbackServerContext* context, const v1::CommitRequest* request,
                                                v1::CommitResponse*) {
  auto* reactor = context->DefaultReactor();
  CommitHere(*request, AcceptTrace(tracer_, *context),
             [reactor](const absl::Status& status) { reactor->Finish(ToGrpcStatus(status)); });
  return reactor;
}

void DecodeService::CommitHere(const v1::CommitRequest& request, const TraceContext& trace,
                               std::function<void(absl::Status)> done) {
  Span span(tracer_, "decode.land", trace, SpanKind::kServer);
  if (const absl::Status status = DoCommit(request, done, std::move(span)); !status.ok()) done(status);
}

// OK: `done` was called, or the landing thread will.
absl::Status DecodeService::DoCommit(const v1::CommitRequest& request, std::function<void(absl::Status)> done,
                                     Span span) {
  SPLICE_ASSIGN_OR_RETURN(const RandomId id, RandomId::FromBytes(request.ticket_id()));
  absl::StatusOr<Ticket*> ticket = tickets_.BeginLanding(id, request.generation());
  CountRefusal(ticket.status());
  SPLICE_RETURN_IF_ERROR(ticket.status());
  LandingTask task{*ticket, request, std::move(done), std::move(span)};
  // In place nothing is checked, and the next step may be waiting for the sequence.
  if ((*ticket)->in_place && !landing_.closed()) {
    Land(std::move(task));
    return absl::OkStatus();
  }
  if (landing_.TryPush(std::move(task))) return absl::OkStatus();
  absl::Status full = absl::UnavailableError("the decode worker is stopping");
  tickets_.Drop(id, full);
  return full;
}

// Counts a refusal by the ticket table.
void DecodeService::CountRefusal(const absl::Status& status) {
  if (status.code() == absl::StatusCode::kNotFound) refused_unknown_.Increment();
  if (status.code() == absl::StatusCode::kFailedPrecondition) refused_generation_.Increment();
  if (status.code() == absl::StatusCode::kAlreadyExists) refused_replayed_.Increment();
}

void DecodeService::LandingLoop() {
  SetThreadPriority(ThreadPriority::kTransfer);
  while (true) {
    std::optional<LandingTask> task = landing_.Pop(kIdleWait);
    if (task)
      Land(std::move(*task));
    else if (landing_.closed())
      return;
  }
}

void DecodeService::Land(LandingTask task) {
  const RandomId id = task.ticket->id;
  const int64_t held = task.ticket->held_pages;
  bool damaged = false;
  absl::Status status = LandPrompt(*task.ticket, task.request, pools_, engine_.model(), damaged);
  if (damaged) checksum_failures_.Increment();
  if (status.ok() && !task.ticket->in_place)
    bytes_in_.Increment(static_cast<double>(task.ticket->num_sent_pages()) *
                        static_cast<double>(pool_.view().page_bytes()));
  if (status.ok() && pools_.kept != nullptr) pools_.kept->CountHeld(held * kernels::kPageTokens);
  if (status.ok()) status = Launch(*task.ticket, task.request, task.span.context());
  task.span.SetStatus(status);
  task.span.End();
  if (!status.ok()) {
    log::Warning("decode.landing_failed", log::F("request", task.ticket->request_id), log::F("status", status));
    tickets_.Drop(id, status);
  }
  task.done(status);
}

absl::Status DecodeService::Launch(Ticket& ticket, const v1::CommitRequest& request, const TraceContext& trace) {
  engine::DecodeRequest decode;
  decode.id = ticket.request_id;
  decode.kv = std::move(ticket.kv);
  if (ticket.classes != nullptr && decode.kv->classes() == nullptr) decode.kv->Compress(ticket.classes);
  const RandomId id = ticket.id;
  const std::shared_ptr<TokenStream> stream = ticket.stream;
  decode.sampling = ticket.sampling;
  decode.decode = ticket.decode;
  decode.compact = std::move(ticket.compact);
  if (decode.compact != nullptr) {  // were reserved before it was known which tokens are left out, if any
    SPLICE_ASSIGN_OR_RETURN(const auto selector, engine::MakeSelectorFor(*decode.kv, decode.decode, engine_.model()));
    SPLICE_RETURN_IF_ERROR(
        engine::FitCompactPages(*selector, engine_.model(), decode.kv->num_tokens(), decode.compact));
  }
  decode.replay = std::move(ticket.replay);
  const auto split = static_cast<std::ptrdiff_t>(ticket.prompt.size()) - ticket.num_output_tokens;
  if (!ticket.prompt.empty()) {
    decode.prompt.assign(ticket.prompt.begin(), ticket.prompt.begin() + split);
    decode.prior_output.assign(ticket.prompt.begin() + split, ticket.prompt.end());
    decode.left_prompt = std::move(ticket.left_prompt);
  }
  for (const v1::SampledToken& token : request.first_tokens()) {
    SPLICE_ASSIGN_OR_RETURN(decode.first_tokens.emplace_back(), wire::FromProto(token));
  }
  decode.cancelled = ticket.cancelled;
  v1::StreamChunk held;
  held.set_kv_bytes(HeldBytes(*decode.kv, decode.compact.get()));
  std::shared_ptr<SequenceSpans> spans;
  if (tracer_.Records(trace)) {
    spans = std::make_shared<SequenceSpans>(tracer_, trace);
    spans->whole.Set("splice.request", ticket.request_id);
    decode.on_start = [spans] { spans->Begin("decode.first_token"); };
  }
  decode.on_tokens = [this, stream, spans,
                      counts = engine::DecodeChoiceCounter()](std::span<const engine::DecodeToken> tokens) mutable {
    if (spans != nullptr) spans->OnTokens(tokens.size());
    generated_tokens_.Increment(static_cast<double>(tokens.size()));
    stream->Push(chunks_.Of(tokens, counts));
  };
  if (ticket.conversation.has_value())
    decode.on_pages_back = [kept = pools_.kept, turn = *std::move(ticket.conversation),
                            exact = static_cast<int64_t>(request.exact_tokens())](const engine::SequenceKv& kv) {
      kept->Keep(turn, kv, exact);
    };
  decode.on_done = [this, id, spans](const absl::Status& status) {
    if (spans != nullptr) spans->End(status);
    tickets_.Drop(id, status);
  };
  if (!tickets_.MarkRunning(id)) return absl::CancelledError("the ticket was released");
  stream->Push(held);
  return engine_.Submit(std::move(decode));
}

grpc::ServerWriteReactor<v1::StreamChunk>* DecodeService::Stream(grpc::CallbackServerContext*,
                                                                 const v1::StreamRequest* request) {
  // A reactor that only says why there is no stream.
  class Refusal final : public grpc::ServerWriteReactor<v1::StreamChunk> {
   public:
    explicit Refusal(const absl::Status& status) { Finish(ToGrpcStatus(status)); }
    void OnDone() override { delete this; }
  };
  const absl::StatusOr<RandomId> id = RandomId::FromBytes(request->ticket_id());
  if (!id.ok()) return new Refusal(id.status());
  const auto stream = tickets_.FindStream(*id, request->generation());
  CountRefusal(stream.status());
  if (!stream.ok()) return new Refusal(stream.status());
  if (auto* reactor = (*stream)->Attach()) return reactor;
  return new Refusal(absl::FailedPreconditionError("the ticket's stream has a reader already"));
}

grpc::ServerUnaryReactor* DecodeService::Release(grpc::CallbackServerContext* context,
                                                 const v1::ReleaseRequest* request, v1::ReleaseResponse*) {
  const absl::StatusOr<RandomId> id = RandomId::FromBytes(request->ticket_id());
  if (!id.ok()) return wire::Answer(context, id.status());
  tickets_.Release(*id, request->generation(), request->writer_quiet(),
                   Errorf(absl::StatusCode::kCancelled, "released: {}", request->reason()));
  pools_.shared.PagesFreed();
  return wire::Answer(context, absl::OkStatus());
}

}  // namespace spl::decode
