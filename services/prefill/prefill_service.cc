#include "services/prefill/prefill_service.h"

#include <algorithm>
#include <utility>

#include "services/base/clock.h"
#include "services/base/grpc_status.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/base/version.h"
#include "services/chunk/remote/chunk_wire.h"
#include "services/wire/convert.h"
#include "services/wire/unary_answer.h"
#include "services/wire/version.h"

namespace spl::prefill {
namespace {

constexpr size_t kMaxProbeKeys = 16384;

prometheus::Counter& CanonicalCounter(Metrics& metrics, const char* result) {
  return metrics.Counter("splice_prefill_canonical_segments_total",
                         "Segments to be computed by themselves in the background, by what became of them.",
                         {{"result", result}});
}

prometheus::Counter& SessionsCounter(Metrics& metrics, const char* reason) {
  return metrics.Counter("splice_prefill_sessions_dropped_total",
                         "Conversations whose KV went: for want of pages, or because their lease was over.",
                         {{"reason", reason}});
}

}  // namespace

PrefillService::PrefillService(engine::PrefillEngine& engine, PeerTable& peers, PushWorker& pushes,
                               TicketGuard& tickets, CacheStreams& cache_streams, std::string worker_id, uint64_t epoch,
                               FidelityShares fidelity, std::shared_ptr<engine::SharedPool> shared,
                               std::shared_ptr<grammar::GrammarCache> grammars, Metrics& metrics, const Tracer& tracer)
    : engine_(engine),
      peers_(peers),
      pushes_(pushes),
      tickets_(tickets),
      cache_streams_(cache_streams),
      worker_id_(std::move(worker_id)),
      epoch_(epoch),
      in_place_(shared != nullptr),
      tracer_(tracer),
      core_(engine, peers, pushes, tickets,
            {.worker_id = worker_id_,
             .epoch = epoch_,
             .fidelity = fidelity,
             .shared = std::move(shared),
             .grammars = std::move(grammars)},
            metrics, tracer),
      waiting_(metrics.Gauge(metric::kNumRequestsWaiting, "Prompts queued or being computed.")),
      kv_usage_(metrics.Gauge(metric::kKvCacheUsagePerc, "Share of KV pages in use, 0 to 1.")),
      pages_used_(metrics.Gauge("splice_kv_pages_used", "KV pages that are not free, cached prefixes included.")),
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
      sessions_(metrics.Gauge("splice_prefill_sessions", "Conversations whose KV is kept for their next turn.")),
      session_pages_(metrics.Gauge("splice_prefill_session_pages", "KV pages that they keep.")),
      sessions_evicted_(SessionsCounter(metrics, "evicted")),
      sessions_expired_(SessionsCounter(metrics, "expired")),
      published_new_(metrics.Counter("splice_prefill_published_chunks_total", "Chunks that Publish calls stored.",
                                     {{"result", "stored"}})),
      published_existing_(metrics.Counter("splice_prefill_published_chunks_total", "Chunks that Publish calls stored.",
                                          {{"result", "existing"}})),
      published_bytes_(
          metrics.Counter("splice_prefill_published_bytes_total", "Payloads of the chunks of Publish calls.")) {}

void PrefillService::set_grpc_address(const std::string& address) {
  std::lock_guard lock(address_mutex_);
  grpc_address_ = address;
}

void PrefillService::UpdateGauges() {
  const engine::PagePool& pool = engine_.pool();
  const double used = static_cast<double>(pool.num_pages() - pool.num_free());
  waiting_.Set(static_cast<double>(engine_.load().queued_requests));
  kv_usage_.Set(used / static_cast<double>(std::max<int64_t>(1, pool.num_pages())));
  pages_used_.Set(used);
  core_.UpdateGauges();
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
  RaiseTo(sessions_evicted_, sessions.num_evicted + sessions.num_gave_way);
  RaiseTo(sessions_expired_, sessions.num_expired);
}

grpc::ServerUnaryReactor* PrefillService::SetDraining(grpc::CallbackServerContext* context,
                                                      const v1::SetDrainingRequest* request, v1::SetDrainingResponse*) {
  draining_by_operator_ = request->draining();
  log::Info("prefill.draining", log::F("on", request->draining()));
  return wire::Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* PrefillService::GetInfo(grpc::CallbackServerContext* context,
                                                  const v1::GetPrefillInfoRequest* request, v1::PrefillInfo* response) {
  if (static_cast<size_t>(request->probe_keys_size()) > kMaxProbeKeys)
    return wire::Answer(
        context, InvalidArgument("probe_keys has {} keys, at most {}", request->probe_keys_size(), kMaxProbeKeys));
  context->AddInitialMetadata(wire::kProgramVersionKey, VersionWithCommit());
  const engine::PrefillLoad load = engine_.load();
  response->set_worker_id(worker_id_);
  response->set_epoch(epoch_);
  *response->mutable_model() = wire::IdentityOf(engine_.model());
  response->set_queued_requests(static_cast<uint32_t>(load.queued_requests));
  response->set_queued_tokens(static_cast<uint64_t>(std::max<int64_t>(0, load.queued_tokens)));
  response->set_prefill_tokens_per_s(load.tokens_per_s);
  response->set_first_tokens_per_s(load.first_tokens_per_s);
  response->set_pair_cost(load.pair_cost);
  response->set_free_pages(static_cast<uint64_t>(engine_.pool().num_free()));
  response->set_total_pages(static_cast<uint64_t>(engine_.pool().num_pages()));
  response->set_total_tokens(static_cast<uint64_t>(engine_.max_cached_tokens()));
  response->set_max_prompt_tokens(static_cast<uint64_t>(engine_.max_prompt_tokens()));
  response->set_draining(draining());
  response->set_structured_output(core_.keeps_to_grammars());
  response->set_unix_nanos(UnixNanos());
  *response->mutable_wire() = wire::OwnVersions();
  for (const PeerTable::Connected& peer : peers_.connected()) {
    response->add_connected_peers(peer.worker_id);
    response->add_connected_channels(peer.channel_id);
  }
  std::vector<chunk::ChunkKey> keys;
  for (const std::string& bytes : request->probe_keys()) {
    const auto digest = wire::DigestFromBytes(bytes, "probe_keys");
    if (!digest.ok()) return wire::Answer(context, digest.status());
    keys.push_back({*digest});
  }
  response->set_probed_tokens(static_cast<uint32_t>(engine_.CountCachedLeading(keys) * chunk::kChunkTokens));
  return wire::Answer(context, absl::OkStatus());
}

grpc::ServerWriteReactor<v1::CacheEvents>* PrefillService::WatchCache(grpc::CallbackServerContext*,
                                                                      const v1::WatchCacheRequest* request) {
  return cache_streams_.Open(*request);
}

grpc::ServerUnaryReactor* PrefillService::ConnectPeer(grpc::CallbackServerContext* context,
                                                      const v1::ConnectPeerRequest* request,
                                                      v1::ConnectPeerResponse* response) {
  auto* reactor = context->DefaultReactor();
  const auto done = [this, reactor, response](const absl::StatusOr<std::shared_ptr<const Peer>>& peer) {
    if (peer.ok()) {
      *response->mutable_writer() = WriterOf(**peer);
      response->set_transport(in_place_ ? "in place" : (*peer)->carrier());
      response->set_bytes_per_s((*peer)->bytes_per_s);
      response->set_write_seconds((*peer)->write_s);
    }
    reactor->Finish(ToGrpcStatus(peer.status()));
  };
  if (const absl::Status status = peers_.Connect(request->endpoint(), done); !status.ok())
    reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

v1::KvWriter PrefillService::WriterOf(const Peer& peer) const {
  v1::KvWriter writer;
  writer.set_channel_id(peer.channel_id);
  writer.set_channel_address(peer.channel_address());
  writer.set_epoch(epoch_);
  writer.set_skips_held(true);
  std::lock_guard lock(address_mutex_);
  writer.set_grpc_address(grpc_address_);
  return writer;
}

grpc::ServerUnaryReactor* PrefillService::Run(grpc::CallbackServerContext* context, const v1::PrefillRequest* request,
                                              v1::PrefillResponse* response) {
  return core_.Run(context, request, response, draining());
}

grpc::ServerUnaryReactor* PrefillService::RevokeTicket(grpc::CallbackServerContext* context,
                                                       const v1::RevokeTicketRequest* request,
                                                       v1::RevokeTicketResponse*) {
  return core_.RevokeTicket(context, request);
}

grpc::ServerUnaryReactor* PrefillService::Publish(grpc::CallbackServerContext* context,
                                                  const v1::PublishRequest* request, v1::PublishResponse* response) {
  auto* const call = new PublishCall(engine_, tracer_, "prefill.publish", worker_id_, context, request, response);
  return call->EndUnless(draining() ? absl::UnavailableError("the prefill worker is draining") : StartPublish(*call));
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

}  // namespace spl::prefill
