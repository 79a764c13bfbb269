#include "services/prefill/prefill_server.h"

#include "services/base/ids.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/chunk/remote/cluster_chunk_store.h"
#include "services/wire/convert.h"

namespace spl::prefill {
namespace {

constexpr std::chrono::milliseconds kGaugePeriod{250};

}  // namespace

absl::StatusOr<std::unique_ptr<PrefillServer>> PrefillServer::Start(std::shared_ptr<const engine::Model> model,
                                                                    const PrefillServerOptions& options) {
  auto server = std::unique_ptr<PrefillServer>(new PrefillServer);
  server->model_ = model;
  SPLICE_ASSIGN_OR_RETURN(const int32_t num_pages, wire::PagesOfPool(options.kv_bytes, *model));
  SPLICE_ASSIGN_OR_RETURN(server->transport_, transport::KvTransport::Create(options.transport));
  const bool on_host = model->backend().host_memory();
  const uint64_t pool_bytes = static_cast<uint64_t>(num_pages) * model->page_bytes();
  // Registered, so that the transport need not pin or copy what it sends.
  SPLICE_ASSIGN_OR_RETURN(server->memory_, server->transport_->Allocate(on_host ? pool_bytes : options.staging_bytes));
  PeerOptions peer_options{.use_device = options.use_device_transfer,
                           .require_device = options.require_device_transfer,
                           .min_bytes_per_s = options.min_transfer_bytes_per_s};
  if (!on_host) {
    SPLICE_ASSIGN_OR_RETURN(server->device_memory_, engine::AllocateKvMemory(*model, num_pages));
    SPLICE_ASSIGN_OR_RETURN(server->staging_, StagingPages::Create(server->memory_->data(), server->memory_->size(),
                                                                   model->page_bytes(), model->backend()));
    peer_options.staging = server->staging_.get();
  }
  const engine::KvPartitions pages =
      on_host ? engine::PartitionHostMemory(*model, server->memory_->data(), num_pages) : server->device_memory_->pages;
  engine::PrefillEngineOptions engine_options = options.engine;
  if (!options.store_address.empty()) {
    chunk::RemoteStoreOptions remote;
    remote.transport = server->transport_.get();
    chunk::ClusterStoreOptions cluster;
    cluster.metrics = &server->metrics_;
    SPLICE_ASSIGN_OR_RETURN(engine_options.store,
                            chunk::ClusterChunkStore::Connect(options.store_address, remote, cluster));
  }
  SPLICE_ASSIGN_OR_RETURN(server->engine_, engine::PrefillEngine::Create(model, pages, engine_options));
  server->peers_ = std::make_unique<PeerTable>(*server->transport_, model, peer_options);
  server->pushes_ =
      std::make_unique<PushWorker>(*model, server->metrics_, [engine = server->engine_.get()] { engine->Wake(); });

  const RandomId epoch = RandomId::Make();
  uint64_t epoch_number = 0;
  for (int i = 0; i < 8; ++i) epoch_number = epoch_number << 8 | epoch.bytes[i];
  const std::string worker_id = options.worker_id.empty() ? "prefill-" + epoch.ToHex().substr(0, 8) : options.worker_id;
  server->service_ = std::make_unique<PrefillService>(*server->engine_, *server->peers_, *server->pushes_, worker_id,
                                                      epoch_number, options.fidelity_share, server->metrics_);
  ServiceHostOptions host;
  host.name = "prefill";
  host.listen = options.listen;
  host.metrics_listen = options.metrics_listen;
  host.drain_timeout = options.drain_timeout;
  host.drain = [s = server.get()](std::chrono::steady_clock::time_point deadline) {
    s->service_->set_draining(true);
    s->engine_->WaitIdle(deadline);
    s->pushes_->WaitIdle(deadline);
  };
  SPLICE_ASSIGN_OR_RETURN(server->host_,
                          ServiceHost::Start(std::move(host), {server->service_.get()}, server->metrics_));
  server->gauges_ = std::make_unique<Periodic>(kGaugePeriod, [s = server->service_.get()] { s->UpdateGauges(); });
  server->host_->SetReady(true);
  log::Info("prefill.ready", log::F("worker", worker_id), log::F("grpc", server->grpc_address()),
            log::F("pages", num_pages), log::F("max_prompt_tokens", server->engine_->max_prompt_tokens()),
            log::F("tokens_per_s", server->engine_->load().tokens_per_s),
            log::F("store", options.store_address.empty() ? std::string("none") : options.store_address),
            log::F("ranks", model->num_ranks()), log::F("backend", model->backend().description()));
  return server;
}

PrefillServer::~PrefillServer() { Stop(); }

// Intake and drain, then the engine (ends what is left), the pushes it started, the channels, the transport.
void PrefillServer::Stop() {
  if (gauges_) gauges_->Stop();
  if (host_) host_->Stop();
  if (engine_) engine_->Stop();
  if (pushes_) pushes_->Stop();
  if (peers_) peers_->Stop();
  if (transport_) transport_->Stop();
}

}  // namespace spl::prefill
