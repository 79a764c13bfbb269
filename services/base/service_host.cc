#include "services/base/service_host.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>

#include <mutex>

#include "services/base/address.h"
#include "services/base/log.h"
#include "services/base/status.h"
#include "services/base/vllm_metrics.h"

namespace spl {
namespace {

constexpr std::chrono::milliseconds kKeepaliveTimeout{20'000};

// gRPC keeps these two switches per process; every host wants both.
void EnableHealthAndReflection() {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

void ApplyLimits(const ServiceHostLimits& limits, const std::string& name, grpc::ServerBuilder& builder) {
  if (limits.memory_bytes > 0) {
    grpc::ResourceQuota quota(name);
    quota.Resize(limits.memory_bytes);
    builder.SetResourceQuota(quota);
  }
  const auto set = [&](const char* argument, int64_t value) {
    if (value > 0) builder.AddChannelArgument(argument, static_cast<int>(value));
  };
  set(GRPC_ARG_MAX_CONCURRENT_STREAMS, limits.max_streams);
  set(GRPC_ARG_MAX_CONNECTION_IDLE_MS, limits.max_idle.count());
  set(GRPC_ARG_MAX_CONNECTION_AGE_MS, limits.max_age.count());
  if (limits.keepalive.count() == 0) return;
  set(GRPC_ARG_KEEPALIVE_TIME_MS, limits.keepalive.count());
  set(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeout.count());
  set(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServiceHost>> ServiceHost::Start(ServiceHostOptions options,
                                                                const std::vector<grpc::Service*>& services,
                                                                Metrics& metrics) {
  auto host = std::unique_ptr<ServiceHost>(new ServiceHost(std::move(options)));
  SPLICE_RETURN_IF_ERROR(host->StartEndpoint(metrics));
  SPLICE_RETURN_IF_ERROR(host->StartServer(services));
  log::Info(host->options_.name + ".serving", log::F("grpc", host->grpc_address_),
            log::F("metrics", host->metrics_address()));
  return host;
}

ServiceHost::~ServiceHost() { Stop(); }

absl::Status ServiceHost::StartServer(const std::vector<grpc::Service*>& services) {
  SPLICE_ASSIGN_OR_RETURN(HostPort address, ParseHostPort(options_.listen));
  EnableHealthAndReflection();
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(options_.listen,
                           options_.credentials ? options_.credentials : grpc::InsecureServerCredentials(), &port);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // a second server on the port must fail, not share it
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                             static_cast<int>(options_.handshake_timeout.count()));
  ApplyLimits(options_.limits, options_.name, builder);
  builder.SetMaxReceiveMessageSize(options_.max_message_bytes);
  builder.SetMaxSendMessageSize(options_.max_message_bytes);
  for (grpc::Service* const service : services) builder.RegisterService(service);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || port == 0) {
    server_.reset();
    return Errorf(absl::StatusCode::kUnavailable, "cannot serve gRPC on '{}': is the port taken?", options_.listen);
  }
  server_->GetHealthCheckService()->SetServingStatus(false);
  address.port = static_cast<uint16_t>(port);
  grpc_address_ = address.ToString();
  return absl::OkStatus();
}

absl::Status ServiceHost::StartEndpoint(Metrics& metrics) {
  if (options_.metrics_listen.empty()) return absl::OkStatus();
  HttpEndpoint::Handlers handlers = options_.extra_handlers;
  handlers["/metrics"] = [this, &metrics] {
    return HttpReply{200, "text/plain; version=0.0.4; charset=utf-8", RenderMetrics(metrics, options_.vllm_model_name)};
  };
  handlers["/healthz"] = [] { return HttpReply{.body = "ok\n"}; };
  handlers["/readyz"] = [this] {
    return ready() ? HttpReply{.body = "ready\n"} : HttpReply{.status = 503, .body = "not ready\n"};
  };
  SPLICE_ASSIGN_OR_RETURN(endpoint_, HttpEndpoint::Start(options_.metrics_listen, std::move(handlers)));
  return absl::OkStatus();
}

void ServiceHost::SetReady(bool ready) {
  ready_.store(ready);
  server_->GetHealthCheckService()->SetServingStatus(ready);
}

std::string ServiceHost::metrics_address() const { return endpoint_ == nullptr ? "" : endpoint_->address(); }

std::shared_ptr<grpc::Channel> ServiceHost::InProcessChannel() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(options_.max_message_bytes);
  arguments.SetMaxSendMessageSize(options_.max_message_bytes);
  return server_->InProcessChannel(arguments);
}

void ServiceHost::Stop() {
  if (stopped_) return;
  stopped_ = true;
  if (server_ != nullptr) {
    SetReady(false);
    log::Info(options_.name + ".draining", log::F("timeout_ms", options_.drain_timeout.count()));
    if (options_.drain) options_.drain(std::chrono::steady_clock::now() + options_.drain_timeout);
    server_->Shutdown(std::chrono::system_clock::now() + options_.shutdown_timeout);
    server_->Wait();
    log::Info(options_.name + ".stopped");
  }
  if (endpoint_ != nullptr) endpoint_->Stop();
}

}  // namespace spl
