// The router as one object: both front ends, the fleet, the dispatch core. splice-router's main wraps it in flags;
// `splice serve` hosts it beside the workers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/otlp_exporter.h"
#include "services/base/program_metrics.h"
#include "services/base/public_tls.h"
#include "services/router/dispatch/dispatcher.h"
#include "services/router/http/http_server.h"
#include "services/router/http/stored_responses.h"
#include "services/router/kb/knowledge_bases.h"

namespace spl::router {

inline constexpr char kTraceUiUrlHelp[] =
    "address of a trace, with {trace_id} in it: https://jaeger.example/trace/{trace_id}; the page /ui links traced "
    "requests to it";
inline constexpr char kToolResultDocumentsHelp[] =
    "documents in the results of tools, whose KV other conversations find again: none, whole (a result is one), "
    "between:TEXT, json (the items of a list) or json:/MEMBER (of a list in an object)";

struct RouterOptions {
  // Hugging Face folder: tokenizer, chat template, context length. Weights are not read. Empty: the model has no text
  // side: requests send token ids, answers carry no text, and served_model_name must be given.
  std::string model_dir;
  // The model's name in requests; empty: the folder's name.
  std::string served_model_name;
  // Used until a worker reports it; 0: from config.json in model_dir.
  uint32_t max_context = 0;
  // HTTP API, including its listen address. The server sets `tls` and `on_handshake` itself.
  HttpServerOptions http;
  // Certificate of the HTTP and gRPC APIs (not of metrics_listen).
  PublicTlsOptions public_tls;
  // HOST:PORT of the gRPC API.
  std::string grpc_listen = "127.0.0.1:8001";
  // HOST:PORT of /metrics, /healthz, /readyz for operators; empty: only on the HTTP API.
  std::string metrics_listen;
  bool vllm_metric_names = false;  // /metrics also has what vLLM has under vLLM's names (VllmFamilies)
  // Other programs of this process, in the order decode, prefill, store: /metrics of the HTTP API has theirs, too, and
  // the label component on every series. They outlive the router.
  std::vector<ProgramMetrics> beside;
  DispatchOptions dispatch;
  // File of "key [name]" lines; empty: no authentication.
  std::string api_keys_file;
  // Without keys the HTTP and gRPC APIs must listen on loopback, unless this allows open access.
  bool insecure_open = false;
  // gRPC API: limit of memory for messages being read and for its connections.
  size_t grpc_memory_bytes = 256 << 20;
  // Secret from which namespaces are derived; see NamespaceKeys.
  std::string secret_file;
  // Knowledge bases and the namespaces API; refused without store addresses.
  KnowledgeBaseOptions knowledge_bases;
  TraceOptions trace;
  // Address of a trace for people, http(s), with "{trace_id}" in it: the page links traced requests to it. Empty: none.
  std::string trace_ui_url;
  // Origins of web pages that may use the OpenAI API, or "*"; see Cors.
  std::vector<std::string> cors_origins;
  OutputFormat output_format = {.tools = "auto", .reasoning = "auto"};  // see ServedModelOptions
  std::string tool_result_documents = "none";                           // likewise
  bool strict_requests = false;                                         // HTTP: a field that has no effect is an error
  StoredResponsesOptions stored_responses;                              // HTTP: for previous_response_id
  bool special_tokens_in_text = false;                                  // see ServedModelOptions
  std::string generation_config = "auto";                               // see ServedModelOptions
  std::chrono::milliseconds history_period{5'000};                      // length of a sample of /control/v1/history
  int admin_threads = 4;     // calls of the admin API that may wait for the stores
  int publish_threads = 2;   // knowledge bases that are published at once; more wait
  int io_threads = 2;        // sockets, timers and all request logic; nothing on them blocks
  int work_threads = 2;      // parsing and tokenizing
  size_t work_queue = 1024;  // requests of one caller that may wait for a work thread; more get 429
  std::chrono::milliseconds drain_timeout{30'000};
};

// Thread-safe, except Stop, which one thread calls.
class RouterServer {
 public:
  // Loads the model folder, binds all addresses and serves. Workers may come later: requests get 503 until a pair is
  // connected. InvalidArgument, NotFound name the file; Unavailable names the address. InvalidArgument: an address is
  // not loopback, there are no keys, and insecure_open is not set.
  static absl::StatusOr<std::unique_ptr<RouterServer>> Start(RouterOptions options);
  virtual ~RouterServer() = default;

  virtual std::string http_address() const = 0;  // HOST:PORT, with the real ports
  virtual std::string grpc_address() const = 0;
  virtual bool tls() const = 0;                     // both APIs speak TLS only
  virtual std::string metrics_address() const = 0;  // "" without one
  virtual bool ready() const = 0;                   // a pair of workers is connected
  virtual Dispatcher& dispatcher() = 0;

  // Becomes not ready, refuses new connections and requests, lets running streams finish for at most drain_timeout,
  // closes. Idempotent.
  virtual void Stop() = 0;
};

// "ready http=HOST:PORT grpc=HOST:PORT"; with TLS "ready http=https://HOST:PORT grpc=grpcs://HOST:PORT".
std::string ReadyLine(const RouterServer& server);

}  // namespace spl::router
