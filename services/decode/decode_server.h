// splice-decode as an object, hosted by the program's main and by the all-in-one process.
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
#include "services/decode/decode_service.h"
#include "services/decode/kept_prompts.h"
#include "services/decode/local_prefill.h"
#include "services/engine/engine.h"
#include "services/membership/membership.h"
#include "services/transport/kv_transport.h"

namespace spl::decode {

// Landing memory beside a pool on a GPU, where no size is asked for. A prompt lands as a whole, and a longer one is
// never taken: as much as the pool, but no more than 4 GiB (32,768 tokens of an 8B model in bf16) and an eighth of the
// host's memory, which page-locking takes away from others; at least 64 MiB.
uint64_t DefaultLandingBytes(uint64_t pool_bytes, uint64_t available_host_bytes);

struct DecodeServerOptions {
  std::string listen = "127.0.0.1:0";          // gRPC
  std::string metrics_listen = "127.0.0.1:0";  // empty: none
  std::string vllm_model_name;                 // see ServiceHostOptions
  std::shared_ptr<const PeerTls> tls;          // for calls between programs, in both directions; null: no TLS
  std::string worker_id;                       // empty: decode-<random>
  uint64_t kv_bytes = 1ull << 30;  // bytes of the page pool; a pool on the host is registered with the transport
  // Only for a pool on a GPU: host memory that remote prefill workers write. Commits copy it to the GPU. nullopt:
  // DefaultLandingBytes.
  std::optional<uint64_t> landing_bytes;
  TraceOptions trace;
  engine::DecodeEngineOptions engine;
  DecodeServiceOptions service;
  local_prefill::LocalPrefillOptions local_prefill;
  // A prefill worker of this process will compute in the pool (shared()). Not with local_prefill, which does so itself.
  bool shares_pool = false;
  // Prompts of conversations that stay in the pool. With shares_pool the prefill worker keeps them in the same pool,
  // and this worker keeps none.
  KeptPromptsOptions sessions;
  // How prompts and decode steps share the device where prompts are computed, too (engine::StepTurns): the target, and
  // whether they take turns; nullopt: on cores they do. Without a target both run at the same time and apart.
  std::optional<std::chrono::milliseconds> itl_target = engine::StepTurns::kDefaultItlTarget;
  std::optional<engine::StepTurns::Sharing> sharing;
  transport::TransportOptions transport;
  std::chrono::milliseconds drain_timeout{30'000};
  // Host that routers and peers use to reach this worker, for gRPC and KV; empty: the host it listens on.
  std::string advertise;
  // Registers the worker as a member once it serves. Null: no registration is needed.
  std::function<absl::StatusOr<std::unique_ptr<membership::Registration>>(const membership::Member&)> join;
};

// Owns all parts of one decode worker. Call Stop() before destruction.
class DecodeServer {
 public:
  static absl::StatusOr<std::unique_ptr<DecodeServer>> Start(std::shared_ptr<const engine::Model> model,
                                                             const DecodeServerOptions& options);
  ~DecodeServer();

  std::string grpc_address() const { return host_->grpc_address(); }  // where it listens
  std::string metrics_address() const { return host_->metrics_address(); }
  Metrics& metrics() { return metrics_; }
  const engine::PagePool& pool() const { return *pool_; }
  const std::shared_ptr<engine::SharedPool>& shared() const { return shared_; }
  transport::KvTransport& transport() { return *transport_; }
  std::span<std::byte> memory() { return {memory_->data(), memory_->size()}; }  // as its endpoint describes it
  std::shared_ptr<grpc::Channel> InProcessChannel() { return host_->InProcessChannel(); }
  // The service's CommitHere.
  prefill::CommitCall commit() {
    return [s = service_.get()](const v1::CommitRequest& request, const TraceContext& trace, auto done) {
      s->CommitHere(request, trace, std::move(done));
    };
  }
  const local_prefill::LocalPrefill* local_prefill() const { return local_.get(); }  // null: none
  void Stop();                                                                       // drains, then ends; idempotent

 private:
  DecodeServer() = default;
  absl::StatusOr<v1::DecodeEndpoint> MakePool(const DecodeServerOptions& options);
  engine::DecodeEngineOptions SetUpPool(const DecodeServerOptions& options);

  std::shared_ptr<const engine::Model> model_;
  Metrics metrics_;
  std::unique_ptr<Tracer> tracer_;
  std::unique_ptr<transport::KvTransport> transport_;
  std::unique_ptr<transport::RegisteredMemory> memory_;  // the pages, or with a pool on a GPU the landing memory
  std::optional<engine::KvMemory> device_memory_;        // the pages of a model on GPUs
  std::unique_ptr<engine::PagePool> pool_;
  std::shared_ptr<engine::SharedPool> shared_;
  std::unique_ptr<KeptPrompts> kept_;          // outlives the engines, which evict from it
  std::unique_ptr<engine::PagePool> landing_;  // memory_ as pages, with a pool on a GPU
  std::unique_ptr<DecodeService> service_;     // outlives the engine, whose callbacks reach it
  std::unique_ptr<engine::DecodeEngine> engine_;
  std::unique_ptr<local_prefill::LocalPrefill> local_;  // outlives the server that serves it
  std::unique_ptr<ServiceHost> host_;
  std::unique_ptr<Periodic> gauges_;
  std::unique_ptr<membership::Registration> registration_;
};

}  // namespace spl::decode
