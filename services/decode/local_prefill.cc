#include "services/decode/local_prefill.h"

#include <future>
#include <utility>

#include "services/base/log.h"
#include "services/base/status.h"
#include "services/chunk/remote/cluster_chunk_store.h"
#include "services/transport/own_memory.h"
#include "services/wire/convert.h"
#include "services/wire/pass_metrics.h"
#include "services/wire/version.h"

namespace spl::local_prefill {
namespace {

// Limit for work that ends by itself after the engine has stopped: a push's last copies, and a call inside the process.
constexpr std::chrono::seconds kEndTimeout{15};

absl::Status CheckPool(const LocalPrefillOptions& options, const engine::PagePool& pool, const engine::Model& model) {
  // A page for the answer, without which no prompt is let in.
  const int64_t pages = pool.num_pages() / engine::KvShapeOf(model.config()).num_streams() - 1;
  if (pages * kernels::kPageTokens >= int64_t{options.max_new_tokens}) return absl::OkStatus();
  return InvalidArgument(
      "local prefill: the page pool holds prompts of {} tokens at most; --local-prefill-tokens {} needs a larger one "
      "(--kv-bytes)",
      std::max<int64_t>(0, pages) * kernels::kPageTokens, options.max_new_tokens);
}

}  // namespace

// The part of the prefill service that a decode worker serves; the rest is Unimplemented.
class LocalPrefill::Service final : public v1::Prefill::CallbackService {
 public:
  explicit Service(LocalPrefill& owner) : owner_(owner) {}

  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, const v1::PrefillRequest* request,
                                v1::PrefillResponse* response) override {
    return owner_.core_->Run(context, request, response, owner_.draining_);
  }
  grpc::ServerUnaryReactor* RevokeTicket(grpc::CallbackServerContext* context, const v1::RevokeTicketRequest* request,
                                         v1::RevokeTicketResponse*) override {
    return owner_.core_->RevokeTicket(context, request);
  }
  grpc::ServerWriteReactor<v1::CacheEvents>* WatchCache(grpc::CallbackServerContext*,
                                                        const v1::WatchCacheRequest* request) override {
    return owner_.cache_streams_->Open(*request);
  }

 private:
  LocalPrefill& owner_;
};

LocalPrefill::LocalPrefill(const LocalPrefillOptions& options, const DecodeHost& host)
    : options_(options),
      host_(host),
      worker_id_(host.worker_id + "/local"),
      waiting_(host.metrics.Gauge("splice_decode_local_prefill_waiting",
                                  "Prompts that are queued or computed on the decode worker itself.")) {}

absl::StatusOr<std::unique_ptr<LocalPrefill>> LocalPrefill::Create(const LocalPrefillOptions& options,
                                                                   const DecodeHost& host) {
  auto local = std::unique_ptr<LocalPrefill>(new LocalPrefill(options, host));
  const engine::Model& model = *host.model;
  SPLICE_RETURN_IF_ERROR(CheckPool(options, host.pool->pool(), model));
  engine::PrefillEngineOptions engine;
  engine.shared = host.pool;
  engine.turns = host.pool->turns();
  engine.slice_tokens = options.slice_tokens;
  engine.executor.max_rows = options.slice_tokens;
  // Slices are small here: a decode step that shares a pass must not take the rows of its slice.
  if (engine.turns != nullptr)
    engine.executor.max_rows += engine::PagesFor(host.pool->max_decode_rows()) * kernels::kPageTokens;
  engine.executor.num_threads = options.num_threads;
  engine.reclaim = host.reclaim;
  engine.session_share = options.session_share;
  engine.session_lease = options.session_lease;
  engine.fetch_by_cost = options.fetch_by_cost;
  engine.canonical_prefill = false;  // background work that no client waits for must not run beside decoding sequences
  engine.on_cache_change = [events = &local->cache_events_](bool stored, auto keys) { events->Report(stored, keys); };
  engine.on_pass = wire::PassObserver(host.metrics);
  if (!options.store_address.empty()) {
    chunk::RemoteStoreOptions remote;
    remote.transport = &host.transport;
    remote.tls = host.tls;
    chunk::ClusterStoreOptions cluster;
    cluster.metrics = &host.metrics;
    SPLICE_ASSIGN_OR_RETURN(engine.store, chunk::ClusterChunkStore::Connect(options.store_address, remote, cluster));
  }
  absl::StatusOr<std::unique_ptr<engine::PrefillEngine>> created =
      engine::PrefillEngine::Create(host.model, host.pool->pool().view(), engine);
  if (!created.ok()) return Annotate(created.status(), "local prefill");
  local->engine_ = *std::move(created);
  prefill::PeerOptions peers;
  peers.open_memory = [l = local.get()](const transport::RemoteMemory&) {
    return transport::MakeOwnMemoryChannel(l->own_memory_);
  };
  peers.open_calls = [l = local.get()](const std::string&) { return l->decode_channel_; };
  peers.commit = [l = local.get()](const v1::CommitRequest& request, const TraceContext& trace, auto done) {
    l->commit_(request, trace, std::move(done));
  };
  local->peers_ = std::make_unique<prefill::PeerTable>(host.transport, host.model, peers);
  local->pushes_ =
      std::make_unique<prefill::PushWorker>(model, host.metrics, [engine = local->engine_.get()] { engine->Wake(); });
  // The router counts whole chunks, and the last token of a prompt is always computed: up to a chunk more than it said.
  local->core_ = std::make_unique<prefill::PrefillCore>(
      *local->engine_, *local->peers_, *local->pushes_, local->tickets_,
      prefill::PrefillCoreOptions{.worker_id = local->worker_id_,
                                  .epoch = host.epoch,
                                  .fidelity = {0, 0},  // as canonical_prefill: nobody waits for a comparison
                                  .max_computed_tokens = int64_t{options.max_new_tokens} + kernels::kPageTokens,
                                  .shared = host.pool,
                                  .grammars = options.grammars},
      host.metrics, host.tracer);
  local->cache_streams_ = std::make_unique<prefill::CacheStreams>(local->cache_events_, host.epoch);
  local->service_ = std::make_unique<Service>(*local);
  return local;
}

LocalPrefill::~LocalPrefill() { Stop(); }

grpc::Service& LocalPrefill::service() { return *service_; }

absl::Status LocalPrefill::Connect(const v1::DecodeEndpoint& endpoint, std::span<std::byte> memory,
                                   std::shared_ptr<grpc::Channel> decode, prefill::CommitCall commit) {
  own_memory_ = memory;
  decode_channel_ = std::move(decode);
  commit_ = std::move(commit);
  std::promise<absl::StatusOr<std::shared_ptr<const prefill::Peer>>> connected;
  SPLICE_RETURN_IF_ERROR(peers_->Connect(endpoint, [&](auto peer) { connected.set_value(std::move(peer)); }));
  SPLICE_ASSIGN_OR_RETURN(own_, connected.get_future().get());
  host_.pool->set_writer_epoch(host_.epoch);
  log::Info("decode.local_prefill_ready", log::F("worker", worker_id_),
            log::F("max_new_tokens", options_.max_new_tokens),
            log::F("max_prompt_tokens", engine_->max_prompt_tokens()), log::F("slice_tokens", options_.slice_tokens),
            log::F("tokens_per_s", engine_->load().tokens_per_s),
            log::F("store", options_.store_address.empty() ? std::string("none") : options_.store_address));
  return absl::OkStatus();
}

void LocalPrefill::Describe(v1::LocalPrefill& info) const {
  const engine::PrefillLoad load = engine_->load();
  info.set_worker_id(worker_id_);
  info.set_max_new_tokens(options_.max_new_tokens);
  info.set_max_prompt_tokens(static_cast<uint64_t>(engine_->max_prompt_tokens()));
  info.set_queued_tokens(static_cast<uint64_t>(std::max<int64_t>(0, load.queued_tokens)));
  info.set_prefill_tokens_per_s(load.tokens_per_s);
  info.set_first_tokens_per_s(load.first_tokens_per_s);
  info.set_pair_cost(load.pair_cost);
  info.set_slice_tokens(static_cast<uint32_t>(options_.slice_tokens));
  info.set_copy_bytes_per_s(own_->bytes_per_s);
  info.set_copy_write_seconds(own_->write_s);
  info.set_has_store(!options_.store_address.empty());
}

void LocalPrefill::UpdateGauges() {
  core_->UpdateGauges();
  waiting_.Set(static_cast<double>(engine_->load().queued_requests));
}

void LocalPrefill::Drain(std::chrono::steady_clock::time_point deadline) {
  draining_ = true;
  engine_->WaitIdle(deadline);
  engine_->Stop();  // ends the remaining work; its releases still reach the worker's service
  pushes_->WaitIdle(std::chrono::steady_clock::now() + kEndTimeout);
  cache_streams_->Close();
}

void LocalPrefill::Stop() {
  draining_ = true;
  if (cache_streams_) cache_streams_->Close();
  if (engine_) engine_->Stop();
  if (pushes_) pushes_->WaitIdle(std::chrono::steady_clock::now() + kEndTimeout);
  if (pushes_) pushes_->Stop();
  if (peers_) peers_->Stop();
  own_.reset();
  decode_channel_.reset();
}

}  // namespace spl::local_prefill
