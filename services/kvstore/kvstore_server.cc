#include "services/kvstore/kvstore_server.h"

#include "services/base/log.h"
#include "services/base/periodic.h"
#include "services/base/service_host.h"
#include "services/base/status.h"
#include "services/kvstore/admin_service.h"
#include "services/kvstore/kvstore_service.h"
#include "services/kvstore/record_table.h"
#include "services/kvstore/records_service.h"
#include "services/kvstore/rma_service.h"

namespace spl::kvstore {
namespace {

constexpr size_t kReadQueueCapacity = 1024;
constexpr std::chrono::seconds kMaintenancePeriod{1};
// Limit for a store without a disk; otherwise the disk is the limit.
constexpr uint64_t kMemoryRecordBytes = 256 << 20;

absl::Status Check(const KvStoreOptions& options) {
  if (options.num_threads < 1 || options.num_threads > 256) {
    return InvalidArgument("num_threads {} is not from 1 to 256", options.num_threads);
  }
  if (!options.data_dir.empty() && options.disk_bytes < (1 << 20)) {
    return InvalidArgument("disk_bytes {} is less than 1 MiB; leave data_dir empty for memory only",
                           options.disk_bytes);
  }
  const std::string& carrier = options.kv_transport;
  if (carrier != "none" && carrier != "auto" && carrier != "shm" && carrier != "tcp") {
    return InvalidArgument("kv_transport is '{}', not auto, shm, tcp or none", carrier);
  }
  if (!(options.low_watermark > 0 && options.low_watermark <= options.high_watermark && options.high_watermark <= 1)) {
    return InvalidArgument("watermarks {} and {} are not 0 < low <= high <= 1", options.low_watermark,
                           options.high_watermark);
  }
  return absl::OkStatus();
}

// Null when none is wanted, or when auto finds none: chunks then travel as gRPC streams.
absl::StatusOr<std::unique_ptr<transport::KvTransport>> MakeTransport(const KvStoreOptions& options) {
  if (options.kv_transport == "none" || options.memory_bytes == 0) return nullptr;
  transport::TransportOptions wanted;
  wanted.carriers = options.kv_transport;
  wanted.listen_host = options.kv_listen_host;
  auto made = transport::KvTransport::Create(wanted);
  if (made.ok() || options.kv_transport != "auto") return made;
  log::Warning("kvstore.no_rma", log::F("cause", made.status()));
  return nullptr;
}

}  // namespace

// In order of construction; destroyed in the opposite one.
struct KvStoreServer::Parts {
  explicit Parts(int num_threads)
      : leases_outstanding(metrics.Gauge(metric::kKvLeasesOutstanding, "Read leases and put reservations in use.")),
        leases_expired(metrics.Counter(metric::kKvLeasesExpiredTotal, "Leases and reservations given up.")),
        quarantined(metrics.Gauge("splice_store_quarantined_bytes",
                                  "Bytes of expired puts that a late write may still reach.")),
        pool(num_threads, kReadQueueCapacity) {}

  void Maintain() {
    leases->Expire();
    puts->Expire();
    store->Maintain();
    const LeaseTable::Stats reads = leases->stats();
    const PutTable::Stats writes = puts->stats();
    leases_outstanding.Set(static_cast<double>(reads.num_leases + writes.num_reservations));
    leases_expired.Increment(static_cast<double>(reads.num_expired + writes.num_expired) - leases_expired.Value());
    quarantined.Set(static_cast<double>(writes.quarantined_bytes));
  }

  Metrics metrics;
  std::unique_ptr<Tracer> tracer;
  prometheus::Gauge& leases_outstanding;
  prometheus::Counter& leases_expired;
  prometheus::Gauge& quarantined;
  std::unique_ptr<transport::KvTransport> transport;
  std::unique_ptr<TieredStore> store;
  std::unique_ptr<RecordStorage> memory_records;  // without a disk
  std::unique_ptr<RecordTable> records;
  std::unique_ptr<LeaseTable> leases;
  std::unique_ptr<PutTable> puts;
  WorkPool pool;
  std::unique_ptr<KvStoreService> service;
  std::unique_ptr<RmaService> rma;
  std::unique_ptr<AdminService> admin;
  std::unique_ptr<RecordsService> records_service;
  std::unique_ptr<ServiceHost> host;
  std::unique_ptr<Periodic> maintenance;
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
  store.reset_damaged_index = options.reset_damaged_index;
  store.watermarks = {options.high_watermark, options.low_watermark};
  SPLICE_ASSIGN_OR_RETURN(parts->transport, MakeTransport(options));
  store.transport = parts->transport.get();
  store.require_registered = options.kv_transport != "auto";
  SPLICE_ASSIGN_OR_RETURN(parts->store, TieredStore::Open(store, parts->metrics));
  RecordStorage* record_storage = parts->store->record_storage();
  if (record_storage == nullptr) {
    parts->memory_records = MakeMemoryRecordStorage(kMemoryRecordBytes);
    record_storage = parts->memory_records.get();
  }
  SPLICE_ASSIGN_OR_RETURN(parts->records, RecordTable::Open(*record_storage, parts->store->has_disk(), Clock::Real()));
  // Memory held by readers and writers cannot be evicted: some of it must stay for all other uses.
  LeaseOptions leases;
  leases.max_bytes = options.memory_bytes / 2;
  parts->leases = std::make_unique<LeaseTable>(leases, Clock::Real());
  PutTableOptions puts;
  puts.max_bytes = options.memory_bytes / 4;
  parts->puts = std::make_unique<PutTable>(puts, Clock::Real());
  SPLICE_ASSIGN_OR_RETURN(parts->tracer, MakeTracer(options.trace, "splice-kvstore", options.listen, parts->metrics));
  parts->service =
      std::make_unique<KvStoreService>(*parts->store, *parts->leases, *parts->puts, parts->pool, *parts->tracer);
  parts->rma = std::make_unique<RmaService>(*parts->store, *parts->leases, *parts->puts, parts->pool,
                                            parts->transport.get(), *parts->tracer);
  parts->admin = std::make_unique<AdminService>(*parts->store, parts->pool);
  parts->records_service = std::make_unique<RecordsService>(*parts->records, parts->pool);
  ServiceHostOptions host;
  host.name = "kvstore";
  host.listen = options.listen;
  host.metrics_listen = options.metrics_listen;
  if (options.tls != nullptr) host.credentials = options.tls->MakeServerCredentials();
  host.drain_timeout = options.drain_timeout;
  host.drain = [s = parts->store.get()](std::chrono::steady_clock::time_point deadline) {
    if (!s->Drain(deadline)) log::Warning("kvstore.drain_incomplete");
  };
  SPLICE_ASSIGN_OR_RETURN(parts->host, ServiceHost::Start(std::move(host),
                                                          {parts->service.get(), parts->rma.get(), parts->admin.get(),
                                                           parts->records_service.get()},
                                                          parts->metrics));
  parts->maintenance = std::make_unique<Periodic>(kMaintenancePeriod, [p = parts.get()] { p->Maintain(); });
  parts->host->SetReady(true);
  return std::unique_ptr<KvStoreServer>(new KvStoreServer(std::move(parts)));
}

std::string KvStoreServer::grpc_address() const { return parts_->host->grpc_address(); }
std::string KvStoreServer::metrics_address() const { return parts_->host->metrics_address(); }

Metrics& KvStoreServer::metrics() { return parts_->metrics; }

void KvStoreServer::Stop() {
  parts_->host->Stop();
  parts_->maintenance->Stop();
  parts_->pool.Stop();
  parts_->store->Stop();
  // No peer reads or writes the memory any more when it goes.
  if (parts_->transport != nullptr) parts_->transport->Stop();
}

}  // namespace spl::kvstore
