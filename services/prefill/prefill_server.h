// splice-prefill as an object: the program's main and the all-in-one process host the same one.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "services/base/metrics.h"
#include "services/base/otlp_exporter.h"
#include "services/base/periodic.h"
#include "services/base/service_host.h"
#include "services/base/tls.h"
#include "services/engine/engine.h"
#include "services/membership/membership.h"
#include "services/prefill/cache_streams.h"
#include "services/prefill/head_lease_table.h"
#include "services/prefill/kv_push.h"
#include "services/prefill/peer_table.h"
#include "services/prefill/prefill_service.h"
#include "services/prefill/ticket_guard.h"
#include "services/transport/kv_transport.h"

namespace spl::prefill {

struct PrefillServerOptions {
  std::string listen = "127.0.0.1:0";          // gRPC
  std::string metrics_listen = "127.0.0.1:0";  // empty: none
  std::shared_ptr<const PeerTls> tls;          // between the programs, in both directions; null: without
  std::string worker_id;                       // empty: prefill-<random>
  uint64_t kv_bytes = 1ull << 30;              // of the page pool; registered with the transport
  std::string store_address;                   // HOST:PORT of a splice-kvstore, or several with commas; empty: none
  double fidelity_share = 0;                   // of the prompts that are not exact: also computed exactly, and compared
  TraceOptions trace;
  engine::PrefillEngineOptions engine;  // its store is set from store_address
  transport::TransportOptions transport;
  // A model on a GPU: host memory through which its pages reach decode workers that they cannot be written to directly.
  uint64_t staging_bytes = 256ull << 20;
  bool require_device_transfer = false;  // from GPU to GPU or not at all
  bool use_device_transfer = true;
  double min_transfer_bytes_per_s = 0;  // see PeerOptions

  // "auto", "device", "shm" or "tcp", as the programs take it.
  void SetKvTransport(const std::string& name) {
    require_device_transfer = name == "device";
    use_device_transfer = name == "device" || name == "auto";
    transport.carriers = name == "device" ? "auto" : name;
  }
  std::chrono::milliseconds drain_timeout{30'000};
  // Host that routers and peers are told to reach this worker by, for gRPC and KV; empty: the one it listens on.
  std::string advertise;
  // Puts the worker on the list of members once it serves; null: nobody has to be told.
  std::function<absl::StatusOr<std::unique_ptr<membership::Registration>>(const membership::Member&)> join;
  HeadLeaseOptions leases;  // on what decode workers leave out
};

// Owns everything of one prefill worker. Stop() before destruction.
class PrefillServer {
 public:
  static absl::StatusOr<std::unique_ptr<PrefillServer>> Start(std::shared_ptr<const engine::Model> model,
                                                              const PrefillServerOptions& options);
  ~PrefillServer();

  std::string grpc_address() const { return host_->grpc_address(); }  // that it listens on
  std::string metrics_address() const { return host_->metrics_address(); }
  const engine::PagePool& pool() const { return engine_->pool(); }
  void Stop();  // drains, then ends; idempotent

 private:
  PrefillServer() = default;

  Metrics metrics_;
  std::unique_ptr<Tracer> tracer_;
  std::shared_ptr<const engine::Model> model_;
  std::unique_ptr<transport::KvTransport> transport_;
  std::unique_ptr<transport::RegisteredMemory> memory_;  // the pages, or of a model on a GPU the staging memory
  std::optional<engine::KvMemory> device_memory_;        // the pages of a model on GPUs
  std::unique_ptr<StagingPages> staging_;
  CacheEvents cache_events_;  // reported to by the engine
  std::unique_ptr<CacheStreams> cache_streams_;
  std::unique_ptr<HeadLeaseTable> leases_;  // asked by the engine when pages are short; closed before the engine goes
  TicketGuard tickets_{{}, Clock::Real()};  // held by what the engine and the push thread have
  std::unique_ptr<engine::PrefillEngine> engine_;
  std::unique_ptr<PeerTable> peers_;
  std::unique_ptr<PushWorker> pushes_;
  std::unique_ptr<PrefillService> service_;
  std::unique_ptr<ServiceHost> host_;
  std::unique_ptr<Periodic> gauges_;
  std::unique_ptr<membership::Registration> registration_;
};

}  // namespace spl::prefill
