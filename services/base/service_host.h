// The frame of every Splice program: a gRPC server with health and reflection, the operators' HTTP endpoint, and an
// ordered stop. A main parses flags, makes the program's services, then calls Start, SetReady, wait, Stop.
//
//   ShutdownSignal stop;                                        // before any thread
//   Metrics metrics;
//   SPLICE_ASSIGN_OR_RETURN(auto host, ServiceHost::Start(options, {&service}, metrics));
//   host->SetReady(true);
//   fmt::print("ready grpc={} metrics={}\n", host->grpc_address(), host->metrics_address());
//   stop.Wait();
//   host->Stop();
#pragma once

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/http_endpoint.h"
#include "services/base/metrics.h"

namespace spl {

// Limits of a gRPC port that untrusted clients reach. 0: no limit of this kind.
struct ServiceHostLimits {
  // For all connections together: memory for messages being read and for the connections themselves. When it is nearly
  // used up, idle connections and then streams are closed.
  size_t memory_bytes = 0;
  int max_streams = 0;                     // per connection at once
  std::chrono::milliseconds max_idle{0};   // a connection without a stream is closed after this time
  std::chrono::milliseconds max_age{0};    // the client is then told to open another connection; running streams finish
  std::chrono::milliseconds keepalive{0};  // between two pings; an unanswered ping closes the connection after 20 s
};

struct ServiceHostOptions {
  // Prefix of log events: "kvstore" gives kvstore.serving, kvstore.draining, kvstore.stopped.
  std::string name;
  // HOST:PORT of gRPC; port 0 picks a free one.
  std::string listen = "127.0.0.1:0";
  // HOST:PORT of /metrics, /healthz and /readyz. Empty: no endpoint (a host inside the all-in-one process).
  std::string metrics_listen = "127.0.0.1:0";
  // The model_name of metrics under vLLM's names (RenderMetrics). Empty: none of these.
  std::string vllm_model_name;
  // Further paths of that endpoint, for example /debug/requests. Handlers must not block.
  HttpEndpoint::Handlers extra_handlers;
  // Null: no encryption.
  std::shared_ptr<grpc::ServerCredentials> credentials;
  // A connection whose handshake takes longer is closed.
  std::chrono::milliseconds handshake_timeout{10'000};
  // Limit of one message in either direction.
  int max_message_bytes = 1 << 30;
  ServiceHostLimits limits;
  // Stop calls this after the host has become not ready and before the server stops taking calls: finish or hand over
  // running work, and return by `deadline`. Null: nothing to drain.
  std::function<void(std::chrono::steady_clock::time_point deadline)> drain;
  std::chrono::milliseconds drain_timeout{30'000};
  // Calls that are still open after this time are cancelled.
  std::chrono::milliseconds shutdown_timeout{2'000};
};

// Owns the server and the endpoint; borrows services and metrics, which must outlive it. Has no process-wide state
// beyond gRPC's own, so several hosts may live in one process. Any thread may call the methods; one thread calls Stop.
class ServiceHost {
 public:
  // Listens and serves, but is not ready yet. Unavailable: an address is taken. InvalidArgument: it is malformed.
  static absl::StatusOr<std::unique_ptr<ServiceHost>> Start(ServiceHostOptions options,
                                                            const std::vector<grpc::Service*>& services,
                                                            Metrics& metrics);
  ~ServiceHost();

  // Sets the health of every service, and /readyz. Calls are answered either way: readiness is advice to load
  // balancers.
  void SetReady(bool ready);
  bool ready() const { return ready_.load(); }

  std::string grpc_address() const { return grpc_address_; }  // with the real port
  std::string metrics_address() const;                        // "" without the endpoint
  // A channel for in-process clients: no socket, the same code path as any channel.
  std::shared_ptr<grpc::Channel> InProcessChannel();

  // Becomes not ready, drains, shuts the server down, closes the endpoint. Returns within drain_timeout +
  // shutdown_timeout, plus the time that a cancelled handler takes to return. Idempotent.
  void Stop();

 private:
  explicit ServiceHost(ServiceHostOptions options) : options_(std::move(options)) {}
  absl::Status StartServer(const std::vector<grpc::Service*>& services);
  absl::Status StartEndpoint(Metrics& metrics);

  const ServiceHostOptions options_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<HttpEndpoint> endpoint_;
  std::string grpc_address_;
  std::atomic<bool> ready_{false};
  bool stopped_ = false;
};

}  // namespace spl
