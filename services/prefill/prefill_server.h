// splice-prefill as an object, hosted by the program's main and by the all-in-one process.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "services/base/metrics.h"
#include "services/base/otlp_exporter.h"
#include "services/base/periodic.h"
#include "services/base/service_host.h"
#include "services/base/tls.h"
#include "services/engine/engine.h"
#include "services/membership/membership.h"
#include "services/prefill/prefill_service.h"
#include "services/prefill_work/cache_streams.h"
#include "services/prefill_work/peer_table.h"
#include "services/prefill_work/push_worker.h"
#include "services/prefill_work/ticket_guard.h"
#include "services/transport/kv_transport.h"

namespace spl::prefill {

// The decode worker of the same process, whose pool the prefill worker computes in: prompts are handed over in place.
// Must outlive the prefill worker.
struct DecodeNeighbour {
  std::shared_ptr<engine::SharedPool> pool;     // null: there is none
  transport::KvTransport* transport = nullptr;  // on which its memory is registered
  std::span<std::byte> memory;                  // as its endpoint describes it
  std::shared_ptr<grpc::Channel> calls;         // to its service
  CommitCall commit;                            // its service's CommitHere
};

struct PrefillServerOptions {
  std::string listen = "127.0.0.1:0";          // gRPC
  std::string metrics_listen = "127.0.0.1:0";  // empty: none
  std::string vllm_model_name;                 // see ServiceHostOptions
  std::shared_ptr<const PeerTls> tls;          // for calls between programs, in both directions; null: no TLS
  std::string worker_id;                       // empty: prefill-<random>
  uint64_t kv_bytes = 1ull << 30;              // bytes of the page pool; registered with the transport
  std::string store_address;                   // HOST:PORT of a splice-kvstore, or several with commas; empty: none
  FidelityShares fidelity;                     // shares of the prompts that are compared with exact
  TraceOptions trace;
  engine::PrefillEngineOptions engine;  // its store is set from store_address
  transport::TransportOptions transport;
  // Only for a model on a GPU: host memory through which pages go to decode workers that the GPU cannot write directly.
  uint64_t staging_bytes = 256ull << 20;
  bool require_device_transfer = false;  // true: GPU to GPU or not at all
  bool use_device_transfer = true;
  double min_transfer_bytes_per_s = 0;  // see PeerOptions

  // Takes "auto", "device", "shm" or "tcp", like the programs' flag.
  void SetKvTransport(const std::string& name) {
    require_device_transfer = name == "device";
    use_device_transfer = name == "device" || name == "auto";
    transport.carriers = name == "device" ? "auto" : name;
  }
  std::chrono::milliseconds drain_timeout{30'000};
  // Host that routers and peers use to reach this worker, for gRPC and KV; empty: the host it listens on.
  std::string advertise;
  // Registers the worker as a member once it serves. Null: no registration is needed.
  std::function<absl::StatusOr<std::unique_ptr<membership::Registration>>(const membership::Member&)> join;
  std::shared_ptr<grammar::GrammarCache> grammars;  // null: requests for structured output are refused
  DecodeNeighbour neighbour;  // its pool is used, and kv_bytes, transport and staging_bytes are not
};

// Owns all parts of one prefill worker. Call Stop() before destruction.
class PrefillServer {
 public:
  static absl::StatusOr<std::unique_ptr<PrefillServer>> Start(std::shared_ptr<const engine::Model> model,
                                                              const PrefillServerOptions& options);
  ~PrefillServer();

  std::string grpc_address() const { return host_->grpc_address(); }  // where it listens
  std::string metrics_address() const { return host_->metrics_address(); }
  Metrics& metrics() { return metrics_; }
  const engine::PagePool& pool() const { return engine_->pool(); }
  void Stop();  // drains, then ends; idempotent

 private:
  PrefillServer() = default;
  absl::StatusOr<engine::PrefillEngineOptions> SetUpEngine(const PrefillServerOptions& options,
                                                           transport::KvTransport& transport);
  absl::StatusOr<engine::KvPartitions> MakePages(const PrefillServerOptions& options, PeerOptions& peers);

  Metrics metrics_;
  std::unique_ptr<Tracer> tracer_;
  std::shared_ptr<const engine::Model> model_;
  std::unique_ptr<transport::KvTransport> transport_;  // null: that of the neighbour
  std::unique_ptr<transport::RegisteredMemory>
      memory_;                                     // the pages, or the staging memory of a model on a GPU; or null
  std::optional<engine::KvMemory> device_memory_;  // the pages of a model on GPUs
  std::unique_ptr<StagingPages> staging_;
  CacheEvents cache_events_;  // the engine reports to it
  std::unique_ptr<CacheStreams> cache_streams_;
  TicketGuard tickets_{{}, Clock::Real()};  // referenced by the engine and by the push thread
  std::unique_ptr<engine::PrefillEngine> engine_;
  std::unique_ptr<PeerTable> peers_;
  std::unique_ptr<PushWorker> pushes_;
  std::unique_ptr<PrefillService> service_;
  std::unique_ptr<ServiceHost> host_;
  std::unique_ptr<Periodic> gauges_;
  std::unique_ptr<membership::Registration> registration_;
};

}  // namespace spl::prefill
