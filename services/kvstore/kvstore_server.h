// splice-kvstore as an object, used by the program's main and by the all-in-one process.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "services/base/metrics.h"
#include "services/base/otlp_exporter.h"
#include "services/base/tls.h"

namespace spl::kvstore {

struct KvStoreOptions {
  std::string listen = "127.0.0.1:0";          // gRPC, HOST:PORT
  std::string metrics_listen = "127.0.0.1:0";  // empty: no metrics endpoint
  std::shared_ptr<const PeerTls> tls;          // required of all clients; null: no TLS
  std::string data_dir;                        // empty: memory only, all chunks are lost with the process
  uint64_t memory_bytes = 1ull << 30;
  bool reset_damaged_index = false;   // false: a damaged index prevents the start
  uint64_t disk_bytes = 16ull << 30;  // limit of payload bytes; the index comes on top (about 100 bytes per chunk)
  double high_watermark = 0.95;       // a write that would fill a tier beyond this share evicts first
  double low_watermark = 0.90;        // … down to this share
  // How peers reach the memory tier: "auto", "shm", "tcp" (see transport::TransportOptions), or "none": through gRPC
  // streams only.
  std::string kv_transport = "none";
  std::string kv_listen_host = "127.0.0.1";
  TraceOptions trace;
  int num_threads = 4;                              // threads that may wait for the disk at the same time
  std::chrono::milliseconds drain_timeout{30'000};  // time to write chunks that are only in memory
};

// Serves from Start to Stop. Stop drains the write-behind queue, so that a clean stop loses nothing. Any thread may
// call it, once; the destructor implies it.
class KvStoreServer {
 public:
  // Unavailable: an address is taken. InvalidArgument: a nonsensical option. Otherwise as DiskTier::Open.
  static absl::StatusOr<std::unique_ptr<KvStoreServer>> Start(const KvStoreOptions& options);
  ~KvStoreServer();

  std::string grpc_address() const;
  std::string metrics_address() const;
  Metrics& metrics();
  void Stop();

 private:
  struct Parts;
  explicit KvStoreServer(std::unique_ptr<Parts> parts);
  const std::unique_ptr<Parts> parts_;
};

}  // namespace spl::kvstore
