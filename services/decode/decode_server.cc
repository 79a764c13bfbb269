#include "services/decode/decode_server.h"

#include <algorithm>

#include "kernels/common/host_memory.h"
#include "services/base/address.h"
#include "services/base/ids.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/wire/convert.h"
#include "services/wire/fidelity_metrics.h"
#include "services/wire/member.h"
#include "services/wire/pass_metrics.h"
#include "services/wire/version.h"

namespace spl::decode {
namespace {

// Behind the pages: where a prefill worker writes when it measures the channel.
constexpr uint64_t kScratchBytes = 1 << 20;
constexpr std::chrono::milliseconds kGaugePeriod{250};

transport::TransportOptions TransportOptionsOf(const DecodeServerOptions& options) {
  transport::TransportOptions transport = options.transport;
  if (transport.advertise_host.empty()) transport.advertise_host = options.advertise;
  return transport;
}

// A GPU runs the kernels of one engine while the other waits for its host.
engine::StepTurns::Sharing SharingOf(const engine::Model& model) {
  return model.backend().host_memory() ? engine::StepTurns::Sharing::kTurns : engine::StepTurns::Sharing::kRides;
}

// Where the host's memory cannot be read it sets no limit.
uint64_t LandingBytesOf(const DecodeServerOptions& options) {
  if (options.landing_bytes.has_value()) return *options.landing_bytes;
  const absl::StatusOr<kernels::HostMemory> host = kernels::ReadHostMemory();
  const uint64_t bytes = DefaultLandingBytes(options.kv_bytes, host.ok() ? host->available_bytes : UINT64_MAX);
  // A prefill worker of this process writes the pool itself: page-locking more would only make the start longer.
  return options.shares_pool ? std::min(bytes, uint64_t{1} << 30) : bytes;
}

// Prompts are computed for the places of sequences that are about to end.
size_t MaxTickets(const DecodeServerOptions& options) {
  return std::max(options.service.max_tickets, 2 * static_cast<size_t>(options.engine.executor.max_rows));
}

}  // namespace

uint64_t DefaultLandingBytes(uint64_t pool_bytes, uint64_t available_host_bytes) {
  return std::max(std::min({pool_bytes, uint64_t{4} << 30, available_host_bytes / 8}), uint64_t{64} << 20);
}

// The pages, and how prefill workers write them.
absl::StatusOr<v1::DecodeEndpoint> DecodeServer::MakePool(const DecodeServerOptions& options) {
  const engine::Model& model = *model_;
  SPLICE_ASSIGN_OR_RETURN(const int32_t num_pages, wire::PagesOfPool(options.kv_bytes, model));
  SPLICE_ASSIGN_OR_RETURN(transport_, transport::KvTransport::Create(TransportOptionsOf(options)));
  const kernels::Backend& backend = model.backend();
  const bool on_host = backend.host_memory();
  const uint64_t registered_pages =
      on_host ? static_cast<uint64_t>(num_pages) : LandingBytesOf(options) / model.page_bytes();
  const uint64_t registered_bytes = registered_pages * model.page_bytes();
  // Whoever writes a shared pool is in this process.
  const auto mapping = on_host && options.shares_pool ? transport::KvTransport::Mapping::kNone
                                                      : transport::KvTransport::Mapping::kByPeers;
  SPLICE_ASSIGN_OR_RETURN(memory_, transport_->Allocate(registered_bytes + kScratchBytes, mapping));
  v1::DecodeEndpoint endpoint;
  if (!on_host) {
    SPLICE_RETURN_IF_ERROR(backend.PinHost(memory_->data(), memory_->size()));
    SPLICE_ASSIGN_OR_RETURN(device_memory_, engine::AllocateKvMemory(model, num_pages));
    for (int r = 0; r < model.num_ranks(); ++r) {
      SPLICE_ASSIGN_OR_RETURN(const std::string handle, model.rank(r).backend().Export(*device_memory_->buffers[r]));
      (r == 0 ? endpoint.mutable_device_handle() : endpoint.add_more_device_handles())->assign(handle);
    }
    landing_ = std::make_unique<engine::PagePool>(kernels::KvPoolView{
        memory_->data(), model.kv_dtype(), model.config().head_dim, static_cast<int32_t>(registered_pages)});
  }
  const engine::KvPartitions pages =
      on_host ? engine::PartitionHostMemory(model, memory_->data(), num_pages) : device_memory_->pages;
  pool_ = std::make_unique<engine::PagePool>(pages, model.backends());

  const RandomId epoch = RandomId::Make();
  endpoint.set_worker_id(options.worker_id.empty() ? "decode-" + epoch.ToHex().substr(0, 8) : options.worker_id);
  uint64_t epoch_number = 0;
  for (int i = 0; i < 8; ++i) epoch_number = epoch_number << 8 | epoch.bytes[i];
  endpoint.set_epoch(epoch_number);
  endpoint.set_ucx_address(transport_->listen_address());
  endpoint.set_pool_rkey(memory_->packed_rkey());
  endpoint.set_pool_base(reinterpret_cast<uint64_t>(memory_->data()));
  endpoint.set_pool_bytes(registered_bytes + kScratchBytes);
  endpoint.set_device_pool_pages(on_host ? 0 : static_cast<uint64_t>(pages.pages_per_rank()));
  endpoint.set_page_bytes(static_cast<uint32_t>(model.page_bytes()));
  endpoint.set_layout_digest(wire::ToBytes(model.layout_digest()));
  if (model.head_classes() != nullptr) endpoint.set_head_class_digest(wire::ToBytes(model.head_classes()->digest()));
  endpoint.set_scratch_offset(registered_bytes);
  endpoint.set_scratch_bytes(kScratchBytes);
  endpoint.set_host_id(transport::HostId());
  *endpoint.mutable_wire() = wire::OwnVersions();
  return endpoint;
}

// Makes what shares the pool with the engine: kept prompts, unless a prefill worker keeps conversations there. The
// prefill engine of a local prefill evicts them later, beside its own cache.
engine::DecodeEngineOptions DecodeServer::SetUpPool(const DecodeServerOptions& options) {
  engine::DecodeEngineOptions engine_options = options.engine;
  engine_options.max_queued = std::max(engine_options.max_queued, MaxTickets(options));  // who has a ticket may wait
  if ((options.local_prefill.enabled() || options.shares_pool) && options.itl_target.has_value())
    engine_options.turns =
        std::make_shared<engine::StepTurns>(*options.itl_target, options.sharing.value_or(SharingOf(*model_)));
  shared_ = std::make_shared<engine::SharedPool>(*pool_, engine_options.turns);
  engine_options.shared = shared_;
  engine_options.on_pass = wire::PassObserver(metrics_);
  if (!options.shares_pool) {
    kept_ = std::make_unique<KeptPrompts>(options.sessions, *pool_, metrics_);
    shared_->AttachCache({.make_room = [kept = kept_.get()](int64_t num_pages) { return kept->MakeRoom(num_pages); }});
  }
  engine_options.fidelity.report = [metrics = std::make_shared<wire::FidelityMetrics>(metrics_, "decode")](
                                       std::string_view selector, const engine::LogitAgreement& agreement,
                                       double kept_mass) {
    metrics->Observe(std::string(selector), agreement);
    metrics->ObserveKeptMass(std::string(selector), kept_mass);
  };
  return engine_options;
}

absl::StatusOr<std::unique_ptr<DecodeServer>> DecodeServer::Start(std::shared_ptr<const engine::Model> model,
                                                                  const DecodeServerOptions& options) {
  auto server = std::unique_ptr<DecodeServer>(new DecodeServer);
  server->model_ = model;
  SPLICE_ASSIGN_OR_RETURN(v1::DecodeEndpoint endpoint, server->MakePool(options));
  const engine::DecodeEngineOptions engine_options = server->SetUpPool(options);
  SPLICE_ASSIGN_OR_RETURN(server->engine_, engine::DecodeEngine::Create(model, *server->pool_, engine_options));

  DecodeServiceOptions service_options = options.service;
  service_options.max_sequences = options.engine.executor.max_rows;
  service_options.max_tickets = MaxTickets(options);
  service_options.tls = options.tls;
  service_options.transport = server->transport_.get();
  SPLICE_ASSIGN_OR_RETURN(server->tracer_,
                          MakeTracer(options.trace, "splice-decode", endpoint.worker_id(), server->metrics_));
  server->service_ = std::make_unique<DecodeService>(
      *server->engine_, ReservationPools{*server->shared_, server->landing_.get(), server->kept_.get()}, endpoint,
      service_options, server->metrics_, *server->tracer_);
  std::vector<grpc::Service*> services = {server->service_.get()};
  if (options.local_prefill.enabled()) {
    const local_prefill::DecodeHost self{.model = model,
                                         .transport = *server->transport_,
                                         .pool = server->shared_,
                                         .reclaim = [kept = server->kept_.get()] { return kept->EvictOne(); },
                                         .metrics = server->metrics_,
                                         .tracer = *server->tracer_,
                                         .tls = options.tls,
                                         .worker_id = endpoint.worker_id(),
                                         .epoch = endpoint.epoch()};
    SPLICE_ASSIGN_OR_RETURN(server->local_, local_prefill::LocalPrefill::Create(options.local_prefill, self));
    services.push_back(&server->local_->service());
  }
  ServiceHostOptions host{.name = "decode",
                          .listen = options.listen,
                          .metrics_listen = options.metrics_listen,
                          .vllm_model_name = options.vllm_model_name};
  if (options.tls != nullptr) host.credentials = options.tls->MakeServerCredentials();
  host.drain_timeout = options.drain_timeout;
  host.drain = [s = server.get()](std::chrono::steady_clock::time_point deadline) {
    s->service_->Drain(deadline);
    if (s->local_) s->local_->Drain(deadline);
  };
  SPLICE_ASSIGN_OR_RETURN(server->host_, ServiceHost::Start(std::move(host), services, server->metrics_));
  const std::string address = WithHost(server->host_->grpc_address(), options.advertise);
  server->service_->set_grpc_address(address);
  if (server->local_) {
    endpoint.set_grpc_address(address);
    SPLICE_RETURN_IF_ERROR(
        server->local_->Connect(endpoint, server->memory(), server->host_->InProcessChannel(), server->commit()));
    server->service_->set_local_prefill(server->local_.get());
  }
  server->gauges_ = std::make_unique<Periodic>(kGaugePeriod, [s = server.get()] {
    s->service_->UpdateGauges();
    if (s->local_) s->local_->UpdateGauges();
  });
  server->host_->SetReady(true);
  const auto num_pages = static_cast<int32_t>(server->pool_->num_pages());
  if (options.join != nullptr) {
    SPLICE_ASSIGN_OR_RETURN(server->registration_,
                            options.join(wire::MemberOf(membership::Role::kDecode, address, endpoint.worker_id(),
                                                        endpoint.epoch(), *model, num_pages)));
  }
  log::Info("decode.ready", log::F("worker", endpoint.worker_id()), log::F("grpc", server->grpc_address()),
            log::F("ucx", endpoint.ucx_address()), log::F("pages", num_pages),
            log::F("tokens", num_pages / engine::KvShapeOf(model->config()).num_streams() * kernels::kPageTokens),
            log::F("ranks", model->num_ranks()), log::F("backend", model->backend().description()));
  return server;
}

DecodeServer::~DecodeServer() { Stop(); }

// Stops intake, drain, local prefill, service, engine, transport: each step needs only parts that still exist.
void DecodeServer::Stop() {
  if (registration_) registration_->Stop();  // first, so that nothing new is sent while running sequences finish
  if (gauges_) gauges_->Stop();
  if (host_) host_->Stop();
  if (local_) local_->Stop();
  if (service_) service_->Stop();
  if (engine_) engine_->Stop();
  if (landing_ && memory_) model_->backend().UnpinHost(memory_->data());
  landing_.reset();
  if (transport_) transport_->Stop();
}

}  // namespace spl::decode
