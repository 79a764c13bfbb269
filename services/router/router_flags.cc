#include "services/router/router_flags.h"

#include <CLI/CLI.hpp>

#include "services/base/address.h"
#include "services/base/status.h"
#include "services/base/version.h"
#include "services/chunk/remote/cluster_chunk_store.h"
#include "services/router/open_address.h"
#include "services/router/request/generation_config_flag.h"

namespace spl::router {

namespace {

void AddModelFlags(CLI::App& app, RouterOptions& options) {
  app.add_option(
         "--model", options.model_dir,
         "Hugging Face folder with tokenizer, chat template and config.json, or ORG/NAME[@REVISION] of a model that "
         "splice pull has fetched")
      ->required()
      ->type_name("DIR|ORG/NAME");
  app.add_option("--served-model-name", options.served_model_name, "Name in requests (default: the folder's name)");
  app.add_flag("--special-tokens-in-text", options.special_tokens_in_text,
               "Parse special tokens such as <|im_end|> in messages and segments as well as in the chat template: "
               "their authors can then write system messages");
  AddGenerationConfigFlag(app, options.generation_config);
}

void AddMetricsFlags(CLI::App& app, RouterOptions& options) {
  app.add_option("--metrics-listen", options.metrics_listen,
                 "Extra address of /metrics, /healthz and /readyz, which are also on --http");
  app.add_flag("--vllm-metric-names", options.vllm_metric_names,
               "Add vLLM's metrics to /metrics under vLLM's names, with the label model_name");
  app.add_option("--trace-ui-url", options.trace_ui_url, kTraceUiUrlHelp);
}

void AddHttpFlags(CLI::App& app, RouterOptions& options) {
  app.add_option("--http", options.http.listen, "Address of the HTTP API; port 0 picks a free one")
      ->capture_default_str();
  app.add_option("--max-connections", options.http.max_connections, "Most HTTP connections; further ones get 503")
      ->capture_default_str();
  app.add_option("--max-body-bytes", options.http.max_body_bytes, "Largest request body; larger ones get 413")
      ->capture_default_str();
  app.add_option("--max-buffered-bytes", options.http.max_buffered_bytes,
                 "HTTP: most bytes of request bodies and unread answers, over all connections; above it the slowest "
                 "clients are disconnected, then new requests get 503")
      ->capture_default_str();
  app.add_option("--cors-origins", options.cors_origins,
                 "Origins of web pages that may use the OpenAI API in a browser, separated by commas; * is all")
      ->delimiter(',');
  app.add_option(
         "--tool-parser", options.output_format.tools,
         "How the model writes calls of tools: auto (by its chat template), none, deepseek, glm4, harmony, hermes, "
         "json, llama3_json, mistral, pythonic or qwen3_coder")
      ->capture_default_str();
  app.add_option("--reasoning-parser", options.output_format.reasoning,
                 "How the model writes its reasoning: auto (by its chat template), none, think or harmony")
      ->capture_default_str();
  app.add_option("--tool-result-documents", options.tool_result_documents, kToolResultDocumentsHelp)
      ->capture_default_str();
  app.add_flag("--strict-requests", options.strict_requests,
               "HTTP: refuse a field that has no effect, instead of naming it in x-splice-ignored");
  app.add_option("--stored-responses-bytes", options.stored_responses.max_bytes,
                 "Memory for responses of /v1/responses that a request may go on with by previous_response_id; 0 keeps "
                 "none")
      ->capture_default_str();
  app.add_option_function<int64_t>(
         "--stored-responses-lease",
         [&options](int64_t seconds) { options.stored_responses.ttl = std::chrono::seconds(seconds); },
         "How long such a response is kept after its last use, in seconds (default: 3600)")
      ->check(CLI::Range(int64_t{1}, int64_t{30} * 24 * 3600));
}

}  // namespace

void RouterFlags::Register(CLI::App& app) {
  app.set_version_flag("--version", VersionWithCommit());
  AddModelFlags(app, options_);
  AddHttpFlags(app, options_);
  app.add_option("--prefill", prefill_, "Prefill workers, HOST:PORT, separated by commas")->delimiter(',');
  app.add_option("--decode", decode_, "Decode workers, HOST:PORT, separated by commas")->delimiter(',');
  membership_.Register(app);
  tls_.Register(app);
  options_.public_tls.Register(app);
  options_.trace.Register(app);
  app.add_option("--grpc", options_.grpc_listen, "Address of the gRPC API")->capture_default_str();
  AddMetricsFlags(app, options_);
  app.add_option("--api-keys", options_.api_keys_file,
                 "File of accepted API keys, one \"key [name] [rpm=N] [tpm=N] [concurrent=N] [weight=W] "
                 "[role=operator|admin]\" per "
                 "line; read again when it changes");
  app.add_flag("--insecure-open", options_.insecure_open,
               "Without --api-keys: serve every client on --http and --grpc, also on addresses other than loopback");
  app.add_option("--secret-file", options_.secret_file, "Secret from which the callers' namespaces are derived");
  app.add_option(
      "--store", options_.knowledge_bases.store,
      "Chunk stores, HOST:PORT, separated by commas, the same as the prefill workers'; for knowledge bases and "
      "the namespaces API");
  app.add_option("--kb-context-tokens", options_.knowledge_bases.publisher.context_tokens,
                 "Most tokens of a context in which documents of a knowledge base are computed; 0: the limit of model "
                 "and workers")
      ->capture_default_str();
  app.add_option("--kb-quota-bytes", options_.knowledge_bases.publisher.quota_bytes,
                 "Most KV bytes of one version of a knowledge base on one store; 0: no limit")
      ->capture_default_str();
  app.add_option("--priority-ageing-ms", priority_ageing_ms_,
                 "Waiting time that counts as much as one step of priority, so that low priorities do not starve")
      ->capture_default_str();
  PlannerOptions& planner = options_.dispatch.planner;
  app.add_option("--ttft-target-ms", ttft_target_ms_, "Planner: target of TTFT, 95th percentile")
      ->capture_default_str();
  app.add_option("--tpot-target-ms", tpot_target_ms_, "Planner: target of the time per output token, 95th percentile")
      ->capture_default_str();
  app.add_option("--min-prefill", planner.prefill.min_replicas, "Planner: workers at least")->capture_default_str();
  app.add_option("--max-prefill", planner.prefill.max_replicas, "Planner: workers at most")->capture_default_str();
  app.add_option("--min-decode", planner.decode.min_replicas, "Planner: workers at least")->capture_default_str();
  app.add_option("--max-decode", planner.decode.max_replicas, "Planner: workers at most")->capture_default_str();
  app.add_flag("--scale-drain", planner.drain,
               "Planner: an autoscaler follows its numbers. Surplus workers get no new requests, and the number drops "
               "once they are idle");
  app.add_option("--scale-down-after-s", scale_down_after_s_,
                 "Planner: seconds for which fewer workers must suffice before it scales down")
      ->capture_default_str();
  app.add_option("--max-queue", options_.dispatch.admission.max_queue, "Most queued requests; further ones get 429")
      ->capture_default_str();
  app.add_option("--max-running", options_.dispatch.admission.max_running, "Most requests in flight")
      ->capture_default_str();
  app.add_option("--grpc-memory-bytes", options_.grpc_memory_bytes,
                 "gRPC API: most bytes of messages and connections; above it connections are closed")
      ->capture_default_str();
  app.add_option("--request-timeout-ms", request_timeout_ms_, "Default and longest deadline of a request")
      ->capture_default_str();
  app.add_option("--drain-timeout-ms", drain_timeout_ms_, "Time for running streams to finish after SIGTERM")
      ->capture_default_str();
  app.add_option("--poll-interval-ms", poll_interval_ms_, "Time between two polls of a worker")->capture_default_str();
  app.add_option("--ticket-ttl-ms", ticket_ttl_ms_,
                 "Time for which a decode worker keeps a KV reservation beyond the expected end of the prompt. If a "
                 "prefill worker is lost, its pages stay unused for as long")
      ->check(CLI::Range(100, 600'000))
      ->capture_default_str();
  app.add_option("--max-attempts", options_.dispatch.max_attempts, "Most attempts before the first token")
      ->capture_default_str();
  app.add_option("--max-migrations", options_.dispatch.max_migrations,
                 "Most moves of a running answer to another decode worker")
      ->capture_default_str();
  app.add_option("--placement", placement_,
                 "splice: the cheapest in seconds; or round-robin, least-loaded, prefix-only")
      ->capture_default_str();
  app.add_option("--placement-credit-decay", options_.dispatch.placement.scorer.credit_decay,
                 "Discount of a cache hit at an overloaded worker; 0: none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--decode-admission-load", options_.dispatch.placement.max_decode_load,
                 "Share of a decode worker's pages that new requests may fill; 1: the worker alone decides")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--prefix-index-chunks", options_.dispatch.prefix_index.capacity,
                 "Most chunks of 64 tokens in the router's prefix index; 150 bytes each")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--placement-temperature", options_.dispatch.placement.temperature,
                 "0: always the cheapest pair of workers; above 0: random choice that prefers cheap pairs")
      ->capture_default_str();
  app.add_option("--io-threads", options_.io_threads, "Threads for sockets and request logic")
      ->capture_default_str()
      ->check(CLI::Range(1, 256));
  app.add_option("--work-threads", options_.work_threads, "Threads for parsing and tokenizing")
      ->capture_default_str()
      ->check(CLI::Range(1, 256));
  app.add_option("--log-level", log_level, "debug, info, warning, error or off")->capture_default_str();
}

absl::StatusOr<RouterOptions> RouterFlags::ToOptions() const {
  RouterOptions options = options_;
  const auto check = [](const char* flag, const std::string& address) -> absl::Status {
    return Annotate(ParseHostPort(address).status(), flag);
  };
  SPLICE_RETURN_IF_ERROR(check("--http", options.http.listen));
  SPLICE_RETURN_IF_ERROR(check("--grpc", options.grpc_listen));
  SPLICE_RETURN_IF_ERROR(CheckOpenAddresses({.http_listen = options.http.listen,
                                             .grpc_listen = options.grpc_listen,
                                             .has_keys = !options.api_keys_file.empty(),
                                             .insecure_open = options.insecure_open}));
  if (!options.metrics_listen.empty()) SPLICE_RETURN_IF_ERROR(check("--metrics-listen", options.metrics_listen));
  for (const std::string& address : prefill_) SPLICE_RETURN_IF_ERROR(check("--prefill", address));
  for (const std::string& address : decode_) SPLICE_RETURN_IF_ERROR(check("--decode", address));
  if (!options.knowledge_bases.store.empty()) {
    SPLICE_RETURN_IF_ERROR(Annotate(chunk::ParseMemberList(options.knowledge_bases.store).status(), "--store"));
  }
  SPLICE_ASSIGN_OR_RETURN(options.dispatch.fleet.discovery, membership_.MakeDiscovery());
  SPLICE_ASSIGN_OR_RETURN(options.dispatch.fleet.tls, PeerTls::Load(tls_));
  options.knowledge_bases.tls = options.dispatch.fleet.tls;
  SPLICE_RETURN_IF_ERROR(options.public_tls.Check());
  const bool listed = !prefill_.empty() || !decode_.empty();
  if (options.dispatch.fleet.discovery == nullptr && (prefill_.empty() || decode_.empty()))
    return InvalidArgument("--discovery static needs --prefill and --decode");
  if (options.dispatch.fleet.discovery != nullptr && listed)
    return InvalidArgument("--discovery {} finds the workers: leave out --prefill and --decode", membership_.discovery);
  if (request_timeout_ms_ == 0) return InvalidArgument("--request-timeout-ms must be positive");
  if (poll_interval_ms_ == 0) return InvalidArgument("--poll-interval-ms must be positive");
  if (options.dispatch.max_attempts == 0) return InvalidArgument("--max-attempts must be positive");
  if (options.http.max_body_bytes == 0 || options.http.max_body_bytes > 1u << 30) {
    return InvalidArgument("--max-body-bytes must be between 1 and {}", 1u << 30);
  }
  if (options.http.max_buffered_bytes < options.http.max_body_bytes)
    return InvalidArgument("--max-buffered-bytes must be {} (--max-body-bytes) at least", options.http.max_body_bytes);
  if (options.grpc_memory_bytes < options.http.max_body_bytes)
    return InvalidArgument("--grpc-memory-bytes must be {} (--max-body-bytes) at least", options.http.max_body_bytes);
  SPLICE_ASSIGN_OR_RETURN(options.dispatch.placement.policy, ParsePlacementPolicy(placement_));
  PlannerOptions& planner = options.dispatch.planner;
  if (ttft_target_ms_ == 0 || tpot_target_ms_ == 0)
    return InvalidArgument("--ttft-target-ms and --tpot-target-ms must be positive");
  if (planner.prefill.min_replicas > planner.prefill.max_replicas ||
      planner.decode.min_replicas > planner.decode.max_replicas)
    return InvalidArgument("--min-prefill and --min-decode must not be above --max-prefill and --max-decode");
  planner.ttft_target_s = ttft_target_ms_ / 1e3;
  planner.tpot_target_s = tpot_target_ms_ / 1e3;
  planner.down_after = std::chrono::seconds(scale_down_after_s_);
  options.dispatch.admission.order.ageing = std::chrono::milliseconds(priority_ageing_ms_);
  options.dispatch.fleet.prefill = prefill_;
  options.dispatch.fleet.decode = decode_;
  options.dispatch.fleet.poll_interval = std::chrono::milliseconds(poll_interval_ms_);
  options.dispatch.ticket_ttl = std::chrono::milliseconds(ticket_ttl_ms_);
  options.dispatch.request_timeout = std::chrono::milliseconds(request_timeout_ms_);
  options.drain_timeout = std::chrono::milliseconds(drain_timeout_ms_);
  return options;
}

}  // namespace spl::router
