#include "services/prefill/prefill_server.h"

#include "services/base/address.h"
#include "services/base/ids.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/chunk/remote/cluster_chunk_store.h"
#include "services/transport/own_memory.h"
#include "services/wire/convert.h"
#include "services/wire/member.h"
#include "services/wire/pass_metrics.h"

namespace spl::prefill {
namespace {

constexpr std::chrono::milliseconds kGaugePeriod{250};

transport::TransportOptions TransportOptionsOf(const PrefillServerOptions& options) {
  transport::TransportOptions transport = options.transport;
  if (transport.advertise_host.empty()) transport.advertise_host = options.advertise;
  return transport;
}

uint64_t NumberOf(const RandomId& id) {
  uint64_t number = 0;
  for (int i = 0; i < 8; ++i) number = number << 8 | id.bytes[i];
  return number;
}

}  // namespace

// The pages, and how decode workers are reached from them.
absl::StatusOr<engine::KvPartitions> PrefillServer::MakePages(const PrefillServerOptions& options, PeerOptions& peers) {
  if (options.neighbour.pool != nullptr) {
    peers.open_memory = [memory = options.neighbour.memory](const transport::RemoteMemory&) {
      return transport::MakeOwnMemoryChannel(memory);
    };
    peers.open_calls = [calls = options.neighbour.calls](const std::string&) { return calls; };
    peers.commit = options.neighbour.commit;
    return options.neighbour.pool->pool().view();
  }
  SPLICE_ASSIGN_OR_RETURN(const int32_t num_pages, wire::PagesOfPool(options.kv_bytes, *model_));
  SPLICE_ASSIGN_OR_RETURN(transport_, transport::KvTransport::Create(TransportOptionsOf(options)));
  const bool on_host = model_->backend().host_memory();
  const uint64_t pool_bytes = static_cast<uint64_t>(num_pages) * model_->page_bytes();
  // Registered, so that the transport need not pin or copy the pages that it sends.
  SPLICE_ASSIGN_OR_RETURN(memory_, transport_->Allocate(on_host ? pool_bytes : options.staging_bytes));
  if (on_host) return engine::PartitionHostMemory(*model_, memory_->data(), num_pages);
  SPLICE_ASSIGN_OR_RETURN(device_memory_, engine::AllocateKvMemory(*model_, num_pages));
  SPLICE_ASSIGN_OR_RETURN(
      staging_, StagingPages::Create(memory_->data(), memory_->size(), model_->page_bytes(), model_->backend()));
  peers.staging = staging_.get();
  return device_memory_->pages;
}

// With its store, and with the pool of the neighbour where there is one.
absl::StatusOr<engine::PrefillEngineOptions> PrefillServer::SetUpEngine(const PrefillServerOptions& options,
                                                                        transport::KvTransport& transport) {
  engine::PrefillEngineOptions engine_options = options.engine;
  if (!options.store_address.empty()) {
    chunk::RemoteStoreOptions remote;
    remote.transport = &transport;
    remote.tls = options.tls;
    chunk::ClusterStoreOptions cluster;
    cluster.metrics = &metrics_;
    SPLICE_ASSIGN_OR_RETURN(engine_options.store,
                            chunk::ClusterChunkStore::Connect(options.store_address, remote, cluster));
  }
  engine_options.on_cache_change = [events = &cache_events_](bool stored, auto keys) { events->Report(stored, keys); };
  engine_options.on_pass = wire::PassObserver(metrics_);
  if (options.neighbour.pool != nullptr) {
    engine_options.shared = options.neighbour.pool;
    engine_options.turns = options.neighbour.pool->turns();
  }
  return engine_options;
}

absl::StatusOr<std::unique_ptr<PrefillServer>> PrefillServer::Start(std::shared_ptr<const engine::Model> model,
                                                                    const PrefillServerOptions& options) {
  auto server = std::unique_ptr<PrefillServer>(new PrefillServer);
  server->model_ = model;
  PeerOptions peer_options{.use_device = options.use_device_transfer,
                           .require_device = options.require_device_transfer,
                           .tls = options.tls,
                           .min_bytes_per_s = options.min_transfer_bytes_per_s};
  SPLICE_ASSIGN_OR_RETURN(const engine::KvPartitions pages, server->MakePages(options, peer_options));
  const DecodeNeighbour& neighbour = options.neighbour;
  transport::KvTransport& transport = neighbour.pool != nullptr ? *neighbour.transport : *server->transport_;
  SPLICE_ASSIGN_OR_RETURN(const engine::PrefillEngineOptions engine_options, server->SetUpEngine(options, transport));
  SPLICE_ASSIGN_OR_RETURN(server->engine_, engine::PrefillEngine::Create(model, pages, engine_options));
  server->peers_ = std::make_unique<PeerTable>(transport, model, peer_options);
  server->pushes_ =
      std::make_unique<PushWorker>(*model, server->metrics_, [engine = server->engine_.get()] { engine->Wake(); });

  const RandomId epoch = RandomId::Make();
  const uint64_t epoch_number = NumberOf(epoch);
  const std::string worker_id = options.worker_id.empty() ? "prefill-" + epoch.ToHex().substr(0, 8) : options.worker_id;
  server->cache_streams_ = std::make_unique<CacheStreams>(server->cache_events_, epoch_number);
  SPLICE_ASSIGN_OR_RETURN(server->tracer_, MakeTracer(options.trace, "splice-prefill", worker_id, server->metrics_));
  server->service_ = std::make_unique<PrefillService>(
      *server->engine_, *server->peers_, *server->pushes_, server->tickets_, *server->cache_streams_, worker_id,
      epoch_number, options.fidelity, neighbour.pool, options.grammars, server->metrics_, *server->tracer_);
  if (neighbour.pool != nullptr) neighbour.pool->set_writer_epoch(epoch_number);
  ServiceHostOptions host{.name = "prefill",
                          .listen = options.listen,
                          .metrics_listen = options.metrics_listen,
                          .vllm_model_name = options.vllm_model_name};
  if (options.tls != nullptr) host.credentials = options.tls->MakeServerCredentials();
  host.drain_timeout = options.drain_timeout;
  host.drain = [s = server.get()](std::chrono::steady_clock::time_point deadline) {
    s->service_->set_draining(true);
    s->engine_->WaitIdle(deadline);
    s->pushes_->WaitIdle(deadline);
    s->cache_streams_->Close();
  };
  SPLICE_ASSIGN_OR_RETURN(server->host_,
                          ServiceHost::Start(std::move(host), {server->service_.get()}, server->metrics_));
  const std::string address = WithHost(server->host_->grpc_address(), options.advertise);
  server->service_->set_grpc_address(address);
  server->gauges_ = std::make_unique<Periodic>(kGaugePeriod, [s = server->service_.get()] { s->UpdateGauges(); });
  server->host_->SetReady(true);
  if (options.join != nullptr) {
    SPLICE_ASSIGN_OR_RETURN(server->registration_,
                            options.join(wire::MemberOf(membership::Role::kPrefill, address, worker_id, epoch_number,
                                                        *model, static_cast<int32_t>(pages.num_pages()))));
  }
  log::Info("prefill.ready", log::F("worker", worker_id), log::F("grpc", server->grpc_address()),
            log::F("pages", pages.num_pages()), log::F("max_prompt_tokens", server->engine_->max_prompt_tokens()),
            log::F("tokens_per_s", server->engine_->load().tokens_per_s),
            log::F("store", options.store_address.empty() ? std::string("none") : options.store_address),
            log::F("ranks", model->num_ranks()), log::F("backend", model->backend().description()));
  return server;
}

PrefillServer::~PrefillServer() { Stop(); }

// Stops intake and drains, then stops the engine (ending the remaining work), the pushes, the channels, the transport.
void PrefillServer::Stop() {
  if (registration_) registration_->Stop();  // first, so that nothing new is sent while running prompts finish
  if (gauges_) gauges_->Stop();
  if (host_) host_->Stop();
  if (cache_streams_) cache_streams_->Close();
  if (engine_) engine_->Stop();
  if (pushes_) pushes_->Stop();
  if (peers_) peers_->Stop();
  if (transport_) transport_->Stop();
}

}  // namespace spl::prefill
