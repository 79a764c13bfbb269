#include "tools/cli/local_cluster.h"

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "services/base/address.h"
#include "services/base/listen_check.h"
#include "services/base/status.h"
#include "services/engine/execution/workspace_bytes.h"
#include "services/router/open_address.h"
#include "services/worker_flags/kv_pool.h"
#include "services/worker_flags/worker_defaults.h"
#include "services/worker_flags/worker_flags.h"
#include "services/worker_flags/worker_grammars.h"

namespace spl::cli {
namespace {

constexpr std::chrono::seconds kReadyTimeout{30};
constexpr std::chrono::milliseconds kReadyPoll{5};
// For a worker in the router's own process to answer. It is silent only when the whole machine is busy, and there is no
// other worker to which its requests could move: taking it for lost would only fail them.
constexpr std::chrono::seconds kAnswerTimeout{30};
struct PoolBytes {
  uint64_t prefill = 0, decode = 0;
};

// Sizes of the page pools on the devices: one that both workers share, or one of each.
absl::StatusOr<PoolBytes> SizePools(const LocalClusterOptions& options, const WorkerDefaults& sizes,
                                    const engine::Model& prefill, const engine::Model& decode, bool shared) {
  const engine::ExecutorOptions steps{.max_rows = sizes.max_sequences, .max_sequences = sizes.max_sequences};
  if (shared) {
    KvPoolNeed both = NeedOfPool("shared", options.kv_bytes, decode, steps);
    // Passes of prompts take decode steps along.
    both.other_bytes += engine::WorkspaceBytes(
        prefill, {.max_rows = sizes.slice_tokens,
                  .max_sequences = sizes.max_sequences + static_cast<int32_t>(sizes.prompts_at_once)});
    SPLICE_ASSIGN_OR_RETURN(const std::vector<uint64_t> bytes, SizeKvPools(decode, {&both, 1}));
    return PoolBytes{.prefill = bytes[0], .decode = bytes[0]};
  }
  const KvPoolNeed needs[] = {NeedOfPool("prefill", options.kv_bytes, prefill, {.max_rows = sizes.slice_tokens}),
                              NeedOfPool("decode", options.kv_bytes, decode, steps)};
  SPLICE_ASSIGN_OR_RETURN(const std::vector<uint64_t> bytes,
                          SizeKvPools(prefill.num_ranks() > decode.num_ranks() ? prefill : decode, needs));
  return PoolBytes{.prefill = bytes[0], .decode = bytes[1]};
}

// The folder with the tokenizer; empty: there is none.
const std::string& TextFolder(const LocalClusterOptions& options) {
  return options.tokenizer_dir.empty() ? options.model.dir : options.tokenizer_dir;
}

// The router would refuse the same, but it starts last: reading a model takes minutes.
absl::Status CheckBeforeLoading(const LocalClusterOptions& options) {
  if (const auto http = ParseHostPort(options.http_listen); !http.ok()) return Annotate(http.status(), "--http");
  if (const auto grpc = ParseHostPort(options.grpc_listen); !grpc.ok()) return Annotate(grpc.status(), "--grpc");
  SPLICE_RETURN_IF_ERROR(router::CheckOpenAddresses({.http_listen = options.http_listen,
                                                     .grpc_listen = options.grpc_listen,
                                                     .has_keys = !options.api_keys_file.empty(),
                                                     .insecure_open = options.insecure_open}));
  SPLICE_RETURN_IF_ERROR(CheckCanListen("--http", options.http_listen));
  SPLICE_RETURN_IF_ERROR(CheckCanListen("--grpc", options.grpc_listen));
  if (options.http_listen == options.grpc_listen && !options.http_listen.ends_with(":0"))
    return InvalidArgument("--http and --grpc are both {}; they need a port each", options.http_listen);
  SPLICE_RETURN_IF_ERROR(options.public_tls.Check());
  if (!options.api_keys_file.empty()) SPLICE_RETURN_IF_ERROR(router::ApiKeys::Load(options.api_keys_file).status());
  if (!options.secret_file.empty()) SPLICE_RETURN_IF_ERROR(router::NamespaceKeys::Load(options.secret_file).status());
  if (TextFolder(options).empty()) return absl::OkStatus();
  return router::ServedModel::Load({.dir = TextFolder(options),
                                    .special_tokens_in_text = options.special_tokens_in_text,
                                    .generation_config = options.generation_config,
                                    .output_format = options.output_format,
                                    .tool_result_documents = options.tool_result_documents})
      .status();
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalCluster>> LocalCluster::Start(const LocalClusterOptions& options) {
  const auto begin = [&](const char* stage) {
    if (options.on_stage) options.on_stage(stage);
  };
  SPLICE_RETURN_IF_ERROR(CheckBeforeLoading(options));
  begin("loading the weights");
  SPLICE_ASSIGN_OR_RETURN(const auto model, LoadModel(options.model, options.backend, options.kv_dtype,
                                                      options.prefill_tp, options.on_load));
  auto decode_model = model;
  if (options.decode_tp != options.prefill_tp) {
    begin("loading the weights of the decode worker");
    SPLICE_ASSIGN_OR_RETURN(
        decode_model, LoadModel(options.model, options.backend, options.kv_dtype, options.decode_tp, options.on_load));
  }
  auto cluster = std::unique_ptr<LocalCluster>(new LocalCluster);
  begin("starting the workers and measuring their speed");

  kvstore::KvStoreOptions store;
  store.listen = "127.0.0.1:0";
  store.metrics_listen = "";  // on the page of the HTTP API
  store.data_dir = options.data_dir;
  store.memory_bytes = options.store_memory_bytes;
  store.disk_bytes = options.store_disk_bytes;
  store.trace = options.trace;
  SPLICE_ASSIGN_OR_RETURN(cluster->store_, kvstore::KvStoreServer::Start(store));

  SPLICE_RETURN_IF_ERROR(cluster->StartWorkers(options, model, decode_model));
  SPLICE_ASSIGN_OR_RETURN(cluster->router_, router::RouterServer::Start(cluster->RouterOptionsOf(options, *model)));
  SPLICE_RETURN_IF_ERROR(cluster->WaitReady());
  return cluster;
}

// The decode worker first: it has the pool that both may share.
absl::Status LocalCluster::StartWorkers(const LocalClusterOptions& options,
                                        const std::shared_ptr<const engine::Model>& model,
                                        const std::shared_ptr<const engine::Model>& decode_model) {
  const bool shares_pool = decode_model == model && options.kv_transport == "auto";
  const WorkerDefaults sizes = SizesOf(model->backend().host_memory(), options.slice_tokens, options.max_sequences);
  SPLICE_ASSIGN_OR_RETURN(const PoolBytes pools, SizePools(options, sizes, *model, *decode_model, shares_pool));

  // One cache for both: the second worker finds what the first has compiled.
  const auto grammars = MakeWorkerGrammars(TextFolder(options), *model);
  decode::DecodeServerOptions decode;
  decode.service.grammars = grammars;
  decode.metrics_listen = "";  // on the page of the HTTP API
  decode.worker_id = "decode-0";
  decode.kv_bytes = pools.decode;
  decode.trace = options.trace;
  decode.engine.executor.num_threads = options.num_threads;
  decode.engine.executor.max_rows = sizes.max_sequences;
  decode.engine.host_tier.bytes = options.host_tier_bytes;
  if (options.no_async_scheduling) decode.engine.async_scheduling = false;
  if (options.no_step_costs) decode.engine.measure_step_costs = false;
  decode.engine.fidelity.share = options.fidelity_share;
  decode.shares_pool = shares_pool;
  decode.itl_target = std::chrono::milliseconds(options.itl_target_ms);
  decode.transport.carriers = options.kv_transport == "device" ? "auto" : options.kv_transport;
  SPLICE_ASSIGN_OR_RETURN(decode_, decode::DecodeServer::Start(decode_model, decode));

  prefill::PrefillServerOptions prefill;
  prefill.grammars = grammars;
  prefill.metrics_listen = "";  // on the page of the HTTP API
  prefill.worker_id = "prefill-0";
  prefill.kv_bytes = pools.prefill;
  prefill.trace = options.trace;
  prefill.fidelity = {options.fidelity_share, options.quality_share};
  prefill.store_address = store_->grpc_address();
  prefill.engine.fetch_by_cost = options.fetch_by_cost;
  prefill.engine.executor.num_threads = options.num_threads;
  prefill.engine.executor.max_rows = sizes.slice_tokens;
  prefill.engine.max_concurrent = sizes.prompts_at_once;
  prefill.SetKvTransport(options.kv_transport);
  if (shares_pool)
    prefill.neighbour = {.pool = decode_->shared(),
                         .transport = &decode_->transport(),
                         .memory = decode_->memory(),
                         .calls = decode_->InProcessChannel(),
                         .commit = decode_->commit()};
  SPLICE_ASSIGN_OR_RETURN(prefill_, prefill::PrefillServer::Start(model, prefill));
  return absl::OkStatus();
}

router::RouterOptions LocalCluster::RouterOptionsOf(const LocalClusterOptions& options,
                                                    const engine::Model& model) const {
  router::RouterOptions router;
  router.model_dir = TextFolder(options);
  if (options.model.dir.empty()) {
    router.served_model_name = model.config().name;
    router.max_context = static_cast<uint32_t>(model.config().max_positions);
  }
  router.http.listen = options.http_listen;
  router.grpc_listen = options.grpc_listen;
  router.vllm_metric_names = options.vllm_metric_names;
  router.api_keys_file = options.api_keys_file;
  router.secret_file = options.secret_file;
  router.insecure_open = options.insecure_open;
  router.cors_origins = options.cors_origins;
  router.strict_requests = options.strict_requests;
  router.output_format = options.output_format;
  router.tool_result_documents = options.tool_result_documents;
  router.special_tokens_in_text = options.special_tokens_in_text;
  router.generation_config = options.generation_config;
  router.public_tls = options.public_tls;
  router.trace = options.trace;
  router.trace_ui_url = options.trace_ui_url;
  router.beside = {{"decode", &decode_->metrics()}, {"prefill", &prefill_->metrics()}, {"store", &store_->metrics()}};
  router.knowledge_bases.store = store_->grpc_address();
  router.dispatch.fleet.prefill = {prefill_->grpc_address()};
  router.dispatch.fleet.decode = {decode_->grpc_address()};
  router.dispatch.fleet.poll_timeout = kAnswerTimeout;
  router.dispatch.fleet.confirm_timeout = kAnswerTimeout;
  router.dispatch.reserve_timeout = kAnswerTimeout;
  return router;
}

absl::Status LocalCluster::WaitReady() {
  const auto deadline = std::chrono::steady_clock::now() + kReadyTimeout;
  std::mutex mutex;
  std::condition_variable never;
  std::unique_lock lock(mutex);
  while (!router_->ready()) {
    if (std::chrono::steady_clock::now() >= deadline)
      return absl::DeadlineExceededError("the workers did not connect; the log above says why");
    never.wait_for(lock, kReadyPoll);
  }
  return absl::OkStatus();
}

size_t LocalCluster::num_requests() const {
  const auto& admission = router_->dispatcher().admission();
  return admission.num_running() + admission.num_waiting();
}

LocalCluster::~LocalCluster() { Stop(); }

void LocalCluster::Stop() {
  if (router_) router_->Stop();
  if (prefill_) prefill_->Stop();
  if (decode_) decode_->Stop();
  if (store_) store_->Stop();
}

}  // namespace spl::cli
