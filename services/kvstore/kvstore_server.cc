#include "services/kvstore/kvstore_server.h"

#include "services/base/log.h"
#include "services/base/service_host.h"
#include "services/base/status.h"
#include "services/kvstore/kvstore_service.h"

namespace spl::kvstore {
namespace {

constexpr size_t kReadQueueCapacity = 1024;

absl::Status Check(const KvStoreOptions& options) {
  if (options.num_threads < 1 || options.num_threads > 256) {
    return InvalidArgument("num_threads {} is not from 1 to 256", options.num_threads);
  }
  if (!options.data_dir.empty() && options.disk_bytes < (1 << 20)) {
    return InvalidArgument("disk_bytes {} is less than 1 MiB; leave data_dir empty for memory only",
                           options.disk_bytes);
  }
  return absl::OkStatus();
}

}  // namespace

// In order of construction; destroyed in the opposite one.
struct KvStoreServer::Parts {
  explicit Parts(int num_threads) : pool(num_threads, kReadQueueCapacity) {}
  Metrics metrics;
  std::unique_ptr<TieredStore> store;
  WorkPool pool;
  std::unique_ptr<KvStoreService> service;
  std::unique_ptr<ServiceHost> host;
};

KvStoreServer::KvStoreServer(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

KvStoreServer::~KvStoreServer() { Stop(); }

absl::StatusOr<std::unique_ptr<KvStoreServer>> KvStoreServer::Start(const KvStoreOptions& options) {
  SPLICE_RETURN_IF_ERROR(Check(options));
  auto parts = std::make_unique<Parts>(options.num_threads);
  TieredStoreOptions store;
  store.memory_bytes = options.memory_bytes;
  store.data_dir = options.data_dir;
  store.disk_bytes = options.disk_bytes;
  SPLICE_ASSIGN_OR_RETURN(parts->store, TieredStore::Open(store, parts->metrics));
  parts->service = std::make_unique<KvStoreService>(*parts->store, parts->pool);
  ServiceHostOptions host;
  host.name = "kvstore";
  host.listen = options.listen;
  host.metrics_listen = options.metrics_listen;
  host.drain_timeout = options.drain_timeout;
  host.drain = [s = parts->store.get()](std::chrono::steady_clock::time_point deadline) {
    if (!s->Drain(deadline)) log::Warning("kvstore.drain_incomplete");
  };
  SPLICE_ASSIGN_OR_RETURN(parts->host, ServiceHost::Start(std::move(host), {parts->service.get()}, parts->metrics));
  parts->host->SetReady(true);
  return std::unique_ptr<KvStoreServer>(new KvStoreServer(std::move(parts)));
}

std::string KvStoreServer::grpc_address() const { return parts_->host->grpc_address(); }
std::string KvStoreServer::metrics_address() const { return parts_->host->metrics_address(); }

void KvStoreServer::Stop() {
  parts_->host->Stop();
  parts_->pool.Stop();
  parts_->store->Stop();
}

}  // namespace spl::kvstore
