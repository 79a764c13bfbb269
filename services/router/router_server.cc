#include "services/router/router_server.h"

#include <malloc.h>

#include <algorithm>
#include <array>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "services/base/address.h"
#include "services/base/log.h"
#include "services/base/service_host.h"
#include "services/base/status.h"
#include "services/router/admission/fair_pool.h"
#include "services/router/admission/work_pool.h"
#include "services/router/dispatch/history_reading.h"
#include "services/router/grpc/admin_service.h"
#include "services/router/grpc/inference_service.h"
#include "services/router/http/admin_api.h"
#include "services/router/http/control_api.h"
#include "services/router/http/cors.h"
#include "services/router/http/http_tls.h"
#include "services/router/http/openai_api.h"
#include "services/router/open_address.h"
#include "services/router/scaling/external_scaler.h"

namespace spl::router {
namespace {

namespace asio = boost::asio;

constexpr size_t kAdminQueue = 256;
constexpr size_t kProbeQueue = 64;
// Freed by requests and answers since the allocator was last asked to give memory back.
constexpr size_t kWorthTrimming = 32 << 20;
// Limits per connection to the gRPC API: a client opens another one when it wants more at once.
constexpr int kMaxGrpcStreams = 256;
constexpr std::chrono::minutes kGrpcIdle{5};
constexpr std::chrono::hours kGrpcAge{1};
constexpr std::chrono::seconds kGrpcKeepalive{60};
constexpr size_t kPublishQueue = 16;                       // each holds its documents
constexpr std::chrono::milliseconds kFlushTimeout{1'000};  // for the last bytes of drained responses

RouterOptions WithStore(RouterOptions options) {
  options.dispatch.has_store = !options.knowledge_bases.store.empty();
  return options;
}

// The page makes it the target of a link.
absl::Status CheckTraceUiUrl(const std::string& url) {
  if (url.empty()) return absl::OkStatus();
  if (!url.starts_with("http://") && !url.starts_with("https://"))
    return InvalidArgument("--trace-ui-url {}: must begin with http:// or https://", url);
  if (url.find("{trace_id}") == std::string::npos)
    return InvalidArgument("--trace-ui-url {}: must have {{trace_id}} where a trace's id belongs", url);
  return absl::OkStatus();
}

class Server final : public RouterServer {
 public:
  explicit Server(RouterOptions options) : options_(WithStore(std::move(options))) {}
  ~Server() override { Stop(); }

  absl::Status Init() {
    SPLICE_RETURN_IF_ERROR(CheckOpenAddresses({.http_listen = options_.http.listen,
                                               .grpc_listen = options_.grpc_listen,
                                               .has_keys = !options_.api_keys_file.empty(),
                                               .insecure_open = options_.insecure_open}));
    if (options_.public_tls.enabled()) {
      SPLICE_RETURN_IF_ERROR(options_.public_tls.Check());
      SPLICE_ASSIGN_OR_RETURN(http_tls_, HttpTls::Load(options_.public_tls.files()));
      NoteCertificate("router.public_tls_on");
    }
    SPLICE_ASSIGN_OR_RETURN(model_, ServedModel::Load({.dir = options_.model_dir,
                                                       .name = options_.served_model_name,
                                                       .max_context = options_.max_context,
                                                       .special_tokens_in_text = options_.special_tokens_in_text,
                                                       .generation_config = options_.generation_config,
                                                       .output_format = options_.output_format,
                                                       .tool_result_documents = options_.tool_result_documents}));
    if (!options_.api_keys_file.empty()) {
      SPLICE_ASSIGN_OR_RETURN(keys_, ApiKeys::Load(options_.api_keys_file));
    }
    if (!options_.secret_file.empty()) {
      SPLICE_ASSIGN_OR_RETURN(namespace_keys_, NamespaceKeys::Load(options_.secret_file));
    }
    if (!keys_.enabled() && !(IsLoopback(options_.http.listen) && IsLoopback(options_.grpc_listen)))
      log::Warning("router.insecure_open", log::F("http", options_.http.listen), log::F("grpc", options_.grpc_listen));
    pool_ = std::make_unique<FairPool>(options_.work_threads, options_.work_queue);
    probe_pool_ = std::make_unique<WorkPool>(1, kProbeQueue);
    for (int i = 0; i < options_.io_threads; ++i) {
      threads_.emplace_back([this] { io_.run(); });
    }
    SPLICE_ASSIGN_OR_RETURN(tracer_, MakeTracer(options_.trace, "splice-router", options_.grpc_listen, metrics_));
    dispatcher_ = std::make_unique<Dispatcher>(io_, options_.dispatch, *model_, namespace_keys_, metrics_, *tracer_);
    SPLICE_ASSIGN_OR_RETURN(bases_, KnowledgeBases::Create(options_.knowledge_bases, *model_, dispatcher_->fleet(),
                                                           namespace_keys_, metrics_));
    admin_pool_ = std::make_unique<WorkPool>(options_.admin_threads, kAdminQueue);
    publish_pool_ = std::make_unique<WorkPool>(options_.publish_threads, kPublishQueue);
    SPLICE_RETURN_IF_ERROR(Serve());
    dispatcher_->Start();
    UpdateReadiness();
    return absl::OkStatus();
  }

  std::string http_address() const override { return http_->address(); }
  std::string grpc_address() const override { return host_->grpc_address(); }
  std::string metrics_address() const override { return host_->metrics_address(); }
  bool tls() const override { return http_tls_ != nullptr; }
  bool ready() const override { return dispatcher_->ready(); }
  Dispatcher& dispatcher() override { return *dispatcher_; }

  void Stop() override {
    {
      std::lock_guard lock(readiness_mutex_);
      if (stopped_) return;
      stopped_ = true;
      readiness_timer_.cancel();
    }
    // The host drains through Drain below, then ends the gRPC calls that are left.
    if (host_ != nullptr) host_->Stop();
    if (http_ != nullptr) {
      http_->FinishResponses(kFlushTimeout);
      http_->CloseAll();
    }
    if (bases_ != nullptr) bases_->Stop();
    if (publish_pool_ != nullptr) publish_pool_->Stop();
    if (admin_pool_ != nullptr) admin_pool_->Stop();
    if (probe_pool_ != nullptr) probe_pool_->Stop();
    if (pool_ != nullptr) pool_->Stop();
    if (dispatcher_ != nullptr) dispatcher_->Stop();
    work_.reset();
    io_.stop();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  absl::Status Serve() {
    const bool loopback = IsLoopback(options_.http.listen);
    SPLICE_RETURN_IF_ERROR(Cors::Check(options_.cors_origins));
    SPLICE_RETURN_IF_ERROR(CheckTraceUiUrl(options_.trace_ui_url));
    cors_ = std::make_unique<Cors>(options_.cors_origins);
    api_ = std::make_unique<OpenAiApi>(
        *dispatcher_, *bases_, keys_, *pool_, *probe_pool_, metrics_,
        OpenAiApiOptions{VllmModelName(), options_.strict_requests, options_.stored_responses, options_.beside});
    admin_api_ = std::make_unique<AdminApi>(*bases_, keys_, loopback, *admin_pool_, *publish_pool_);
    history_ = std::make_unique<History>(HistoryOptionsFor(options_.history_period));
    control_api_ = std::make_unique<ControlApi>(*dispatcher_, *history_, keys_,
                                                ControlApiOptions{loopback, options_.trace_ui_url});
    HttpServerOptions http = options_.http;
    http.tls = http_tls_;
    http.on_handshake = [this](HandshakeResult result) { handshakes_[static_cast<size_t>(result)]->Increment(); };
    SPLICE_ASSIGN_OR_RETURN(http_, HttpServer::Start(
                                       io_, std::move(http),
                                       [this](std::shared_ptr<HttpExchange> exchange) {
                                         const std::string& path = exchange->request().path;
                                         if (ControlApi::Serves(path)) return control_api_->Handle(exchange);
                                         if (path.starts_with(kAdminPrefix)) return admin_api_->Handle(exchange);
                                         const auto preflight = cors_->Preflight(exchange->request());
                                         if (preflight.has_value()) return exchange->Respond(*preflight);
                                         api_->Handle(cors_->Wrap(std::move(exchange)));
                                       },
                                       &OpenAiApi::ErrorBodyOf,
                                       [this](const HttpRequest& header) {
                                         if (ControlApi::Serves(header.path)) return control_api_->Refuse(header);
                                         if (header.path.starts_with(kAdminPrefix)) return admin_api_->Refuse(header);
                                         std::optional<HttpResponse> refusal = api_->Refuse(header);
                                         if (!refusal.has_value()) return refusal;
                                         for (auto& added : cors_->HeadersFor(header.origin))
                                           refusal->headers.push_back(std::move(added));
                                         return refusal;
                                       }));
    inference_ = std::make_unique<InferenceService>(*dispatcher_, *bases_, keys_, *pool_);
    admin_service_ =
        std::make_unique<AdminService>(*bases_, keys_, IsLoopback(options_.grpc_listen), *admin_pool_, *publish_pool_);
    scaler_ = std::make_unique<ExternalScaler>(dispatcher_->planner());
    ServiceHostOptions host;
    host.name = "router";
    host.listen = options_.grpc_listen;
    host.metrics_listen = options_.metrics_listen;
    host.vllm_model_name = VllmModelName();
    if (http_tls_ != nullptr) host.credentials = MakePublicServerCredentials(options_.public_tls);
    host.handshake_timeout = options_.http.handshake_timeout;
    host.max_message_bytes = static_cast<int>(options_.http.max_body_bytes);
    host.drain_timeout = options_.drain_timeout;
    host.limits = {.memory_bytes = options_.grpc_memory_bytes,
                   .max_streams = kMaxGrpcStreams,
                   .max_idle = kGrpcIdle,
                   .max_age = kGrpcAge,
                   .keepalive = kGrpcKeepalive};
    host.drain = [this](std::chrono::steady_clock::time_point deadline) {
      http_->StopAccepting();
      bases_->Stop();  // a publish may take minutes more: it ends here, and is listed as failed
      dispatcher_->Drain(deadline);
    };
    SPLICE_ASSIGN_OR_RETURN(
        host_, ServiceHost::Start(std::move(host), {inference_.get(), admin_service_.get(), scaler_.get()}, metrics_));
    return absl::OkStatus();
  }

  prometheus::Counter& KeyReloads(const char* result) {
    return metrics_.Counter("splice_router_api_keys_reloads_total", "Changed files of API keys that were read again.",
                            {{"result", result}});
  }

  // A small file, once a second at most, and only when it has changed.
  void ReloadKeys() {
    const absl::StatusOr<bool> reloaded = keys_.ReloadIfChanged();
    if (!reloaded.ok()) {
      keys_refused_.Increment();
      log::Error("router.api_keys_not_reloaded", log::F("status", reloaded.status()));
    } else if (*reloaded) {
      keys_reloaded_.Increment();
      log::Info("router.api_keys_reloaded", log::F("file", options_.api_keys_file));
    }
  }

  prometheus::Counter& Handshakes(const char* result) {
    return metrics_.Counter("splice_router_public_tls_handshakes_total",
                            "Connections to the HTTP API with TLS, by how they began.", {{"result", result}});
  }
  prometheus::Counter& CertificateReloads(const char* result) {
    return metrics_.Counter("splice_router_public_tls_reloads_total",
                            "Changed certificates of the public APIs that were read again.", {{"result", result}});
  }
  // See ServiceHostOptions.
  std::string VllmModelName() const { return options_.vllm_metric_names ? model_->name() : ""; }

  void NoteCertificate(const char* event) {
    const auto until = std::chrono::duration_cast<std::chrono::seconds>(http_tls_->valid_until().time_since_epoch());
    certificate_end_.Set(static_cast<double>(until.count()));
    log::Info(event, log::F("cert", options_.public_tls.cert_file), log::F("valid_until_s", until.count()));
  }
  // gRPC reads the files by itself.
  void ReloadCertificate() {
    if (http_tls_ == nullptr) return;
    const absl::StatusOr<bool> reloaded = http_tls_->ReloadIfChanged();
    if (!reloaded.ok()) {
      certificates_refused_.Increment();
      log::Error("router.public_tls_not_reloaded", log::F("status", reloaded.status()));
    } else if (*reloaded) {
      certificates_reloaded_.Increment();
      NoteCertificate("router.public_tls_reloaded");
    }
  }

  // Returns memory of large requests and answers from the allocator to the system. That takes some milliseconds, so it
  // runs on a thread on which no request waits.
  void TrimMemory() {
    const size_t peak = http_->TakePeakBytes();
    if (peak < http_->buffered_bytes() + kWorthTrimming) return;
    (void)probe_pool_->TryPost([] { malloc_trim(0); });
  }

  // gRPC health and the operators' /readyz follow the fleet.
  void UpdateReadiness() {
    std::lock_guard lock(readiness_mutex_);
    if (stopped_) return;
    if (host_->ready() != dispatcher_->ready()) host_->SetReady(dispatcher_->ready());
    if (history_->Due()) history_->Add(ReadHistory(*dispatcher_));
    if (++readiness_rounds_ % 10 == 0) {
      ReloadKeys();
      TrimMemory();
    }
    const auto refresh_s = static_cast<uint64_t>(std::max<int64_t>(1, options_.public_tls.refresh.count()));
    if (readiness_rounds_ % (10 * refresh_s) == 0) ReloadCertificate();
    readiness_timer_.expires_after(std::chrono::milliseconds(100));
    readiness_timer_.async_wait([this](const boost::system::error_code& error) {
      if (!error) UpdateReadiness();
    });
  }

  const RouterOptions options_;
  Metrics metrics_;
  std::unique_ptr<Tracer> tracer_;
  std::unique_ptr<ServedModel> model_;
  ApiKeys keys_;
  prometheus::Counter& keys_reloaded_ = KeyReloads("ok");
  prometheus::Counter& keys_refused_ = KeyReloads("refused");
  NamespaceKeys namespace_keys_;
  std::shared_ptr<HttpTls> http_tls_;  // null: plain text
  prometheus::Counter& certificates_reloaded_ = CertificateReloads("ok");
  prometheus::Counter& certificates_refused_ = CertificateReloads("refused");
  prometheus::Gauge& certificate_end_ = metrics_.Gauge("splice_router_public_tls_valid_until_seconds",
                                                       "When the certificate of the public APIs expires; 0: no TLS.");
  const std::array<prometheus::Counter*, 4> handshakes_ = {
      // in the order of HandshakeResult
      &Handshakes("ok"), &Handshakes("failed"), &Handshakes("timeout"), &Handshakes("plain_text")};
  // Before everything that has timers and sockets on it: it must go last.
  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> work_{io_.get_executor()};
  std::mutex readiness_mutex_;  // guards the three below: the timer's threads and Stop
  asio::steady_timer readiness_timer_{io_};
  bool stopped_ = false;
  uint64_t readiness_rounds_ = 0;
  std::unique_ptr<FairPool> pool_;
  std::unique_ptr<WorkPool> probe_pool_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::unique_ptr<KnowledgeBases> bases_;
  std::unique_ptr<WorkPool> admin_pool_;
  std::unique_ptr<WorkPool> publish_pool_;
  std::unique_ptr<Cors> cors_;
  std::unique_ptr<OpenAiApi> api_;
  std::unique_ptr<AdminApi> admin_api_;
  std::unique_ptr<History> history_;
  std::unique_ptr<ControlApi> control_api_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<InferenceService> inference_;
  std::unique_ptr<AdminService> admin_service_;
  std::unique_ptr<ExternalScaler> scaler_;
  std::unique_ptr<ServiceHost> host_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::string ReadyLine(const RouterServer& server) {
  return fmt::format("ready http={}{} grpc={}{}", server.tls() ? "https://" : "", server.http_address(),
                     server.tls() ? "grpcs://" : "", server.grpc_address());
}

absl::StatusOr<std::unique_ptr<RouterServer>> RouterServer::Start(RouterOptions options) {
  auto server = std::make_unique<Server>(std::move(options));
  SPLICE_RETURN_IF_ERROR(server->Init());
  return server;
}

}  // namespace spl::router
