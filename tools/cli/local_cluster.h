// The whole cluster in one process: chunk store, prefill worker, decode worker and router. They are the servers of the
// four programs, and use gRPC over loopback and the KV transport. There is one copy of the weights, unless the two
// workers split them differently.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "services/decode/decode_server.h"
#include "services/engine/engine.h"
#include "services/engine/runtime/step_turns.h"
#include "services/kvstore/kvstore_server.h"
#include "services/prefill/prefill_server.h"
#include "services/router/router_server.h"
#include "services/worker_flags/worker_flags.h"

namespace spl::cli {

struct LocalClusterOptions {
  ModelSource model;
  std::string tokenizer_dir;  // "": the model's folder; with random weights: token ids only
  std::string http_listen = "127.0.0.1:8000";
  std::string grpc_listen = "127.0.0.1:8001";
  bool vllm_metric_names = false;  // see router::RouterOptions
  std::string api_keys_file;
  std::string secret_file;                                                      // see router::RouterOptions
  bool insecure_open = false;                                                   // see router::RouterOptions
  std::vector<std::string> cors_origins;                                        // see router::RouterOptions
  bool strict_requests = false;                                                 // see router::RouterOptions
  router::OutputFormat output_format = {.tools = "auto", .reasoning = "auto"};  // see router::RouterOptions
  std::string tool_result_documents = "none";                                   // likewise
  bool special_tokens_in_text = false;     // parse those in messages and segments (router::ServedModel)
  std::string generation_config = "auto";  // see router::RouterOptions
  PublicTlsOptions public_tls;             // TLS of the HTTP and gRPC APIs
  std::string backend = "auto";
  std::string kv_dtype = "auto";
  std::string kv_transport = "auto";
  std::string data_dir;  // folder of the chunk store; empty: memory only
  int32_t prefill_tp = 1;
  int32_t decode_tp = 1;
  // Size of the page pool; nullopt: auto (SizeKvPools). The two workers share one, unless they split the model
  // differently or kv_transport names a way between them: then each has one of this size.
  std::optional<uint64_t> kv_bytes;
  bool fetch_by_cost = false;  // engine::PrefillEngineOptions::fetch_by_cost
  uint64_t store_memory_bytes = 512ull << 20;
  uint64_t store_disk_bytes = 8ull << 30;
  int32_t num_threads = 0;           // compute threads per worker; 0: one per core
  int32_t max_sequences = 0;         // in a decode step; 0: by device (worker_defaults.h)
  uint64_t host_tier_bytes = 0;      // engine::HostTierOptions::bytes
  bool no_async_scheduling = false;  // DecodeEngineOptions::async_scheduling
  bool no_step_costs = false;        // DecodeEngineOptions::measure_step_costs
  int32_t slice_tokens = 0;          // tokens of one prefill slice, a multiple of 64; 0: by device
  // How prompts and decode steps share the device (engine::StepTurns), where both workers share a pool.
  int64_t itl_target_ms = engine::StepTurns::kDefaultItlTarget.count();
  double fidelity_share = 0.01;
  double quality_share = 0.05;
  TraceOptions trace;
  std::string trace_ui_url;  // see router::RouterOptions
  // Called when a part of the start that takes long begins, in words; may be null.
  std::function<void(const char* stage)> on_stage;
  // engine::ModelOptions::on_progress, in the stage that loads the weights; may be null.
  std::function<void(uint64_t done_bytes, uint64_t total_bytes)> on_load;
};

// Owns the four servers. Call Stop() before destruction.
class LocalCluster {
 public:
  // Starts the servers; returns when the workers are connected and requests are served. Errors are those of the
  // servers. Addresses, ports, certificates, keys and tokenizer are checked before a model is loaded.
  static absl::StatusOr<std::unique_ptr<LocalCluster>> Start(const LocalClusterOptions& options);
  ~LocalCluster();

  const router::RouterServer& router() const { return *router_; }
  std::string http_address() const { return router_->http_address(); }
  std::string grpc_address() const { return router_->grpc_address(); }
  // Requests that run or wait.
  size_t num_requests() const;
  // Stops the router first, so that it does not call a stopped worker; then the workers; then the store, to which they
  // publish.
  void Stop();

 private:
  LocalCluster() = default;
  absl::Status StartWorkers(const LocalClusterOptions& options, const std::shared_ptr<const engine::Model>& model,
                            const std::shared_ptr<const engine::Model>& decode_model);
  // REQUIRES: store and workers have started.
  router::RouterOptions RouterOptionsOf(const LocalClusterOptions& options, const engine::Model& model) const;
  absl::Status WaitReady();

  std::unique_ptr<kvstore::KvStoreServer> store_;
  std::unique_ptr<decode::DecodeServer> decode_;
  std::unique_ptr<prefill::PrefillServer> prefill_;  // may compute in the decode worker's pool
  std::unique_ptr<router::RouterServer> router_;
};

}  // namespace spl::cli
