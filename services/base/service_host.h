// What every program of Splice runs in: a gRPC server with health and reflection, the operators' HTTP endpoint, and an
// ordered stop. A main is then: parse flags, make the program's services, Start, SetReady, wait, Stop.
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

// Limits of a gRPC port that strangers reach. 0: no limit of this kind.
struct ServiceHostLimits {
  // For all connections together: messages that are read and what belongs to connections. When it is nearly used up
  // idle connections and then streams are closed.
  size_t memory_bytes = 0;
  int max_streams = 0;                     // of one connection at once
  std::chrono::milliseconds max_idle{0};   // without a stream; then the connection is closed
  std::chrono::milliseconds max_age{0};    // then the client is told to open another one; streams end by themselves
  std::chrono::milliseconds keepalive{0};  // between two pings; an unanswered one closes the connection after 20 s
};

struct ServiceHostOptions {
  // For log lines: "kvstore" gives kvstore.serving, kvstore.draining, kvstore.stopped.
  std::string name;
  // HOST:PORT of gRPC. Port 0 picks a free one.
  std::string listen = "127.0.0.1:0";
  // HOST:PORT of /metrics, /healthz and /readyz. Empty: no such endpoint (a host inside the all-in-one process).
  std::string metrics_listen = "127.0.0.1:0";
  // Further paths of that endpoint, for example /debug/requests. Must not block.
  HttpEndpoint::Handlers extra_handlers;
  // Null: no encryption.
  std::shared_ptr<grpc::ServerCredentials> credentials;
  // From a connection to the end of its handshake; then it is closed.
  std::chrono::milliseconds handshake_timeout{10'000};
  // Of one message in either direction.
  int max_message_bytes = 1 << 30;
  ServiceHostLimits limits;
  // Called by Stop after the host has become not ready and before the server stops to take calls: finish or hand over
  // what is running, return at `deadline` at the latest. Null: nothing to drain.
  std::function<void(std::chrono::steady_clock::time_point deadline)> drain;
  std::chrono::milliseconds drain_timeout{30'000};
  // Calls that are still open after this long are cancelled.
  std::chrono::milliseconds shutdown_timeout{2'000};
};

// Owns the server and the endpoint; borrows services and metrics, which must outlive it. No process-wide state beyond
// gRPC's own: several hosts live in one process. Methods may be called from any thread, Stop from one.
class ServiceHost {
 public:
  // Listens and serves; not ready yet. Unavailable when an address is taken, InvalidArgument when it is malformed.
  static absl::StatusOr<std::unique_ptr<ServiceHost>> Start(ServiceHostOptions options,
                                                            const std::vector<grpc::Service*>& services,
                                                            Metrics& metrics);
  ~ServiceHost();

  // Health for every service and /readyz follow. Calls are answered either way: readiness is advice to balancers.
  void SetReady(bool ready);
  bool ready() const { return ready_.load(); }

  std::string grpc_address() const { return grpc_address_; }  // with the real port
  std::string metrics_address() const;                        // "" without the endpoint
  // For in-process clients: no socket, same code path as any channel.
  std::shared_ptr<grpc::Channel> InProcessChannel();

  // Not ready → drain → server shut down → endpoint closed. Returns within drain_timeout + shutdown_timeout plus what
  // a cancelled handler takes to return. Idempotent.
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
