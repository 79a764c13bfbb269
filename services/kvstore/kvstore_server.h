// splice-kvstore as an object: the program's main makes one, and so does the all-in-one process.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "services/base/otlp_exporter.h"
#include "services/base/tls.h"

namespace spl::kvstore {

struct KvStoreOptions {
  std::string listen = "127.0.0.1:0";          // gRPC, HOST:PORT
  std::string metrics_listen = "127.0.0.1:0";  // empty: no metrics endpoint
  std::shared_ptr<const PeerTls> tls;          // required of all clients; null: none
  std::string data_dir;                        // empty: memory only, everything is gone with the process
  uint64_t memory_bytes = 1ull << 30;
  bool reset_damaged_index = false;   // else it keeps the store from starting
  uint64_t disk_bytes = 16ull << 30;  // of payloads; the index comes on top (about 100 bytes a chunk)
  double high_watermark = 0.95;       // what would fill a tier beyond this share evicts first,
  double low_watermark = 0.90;        // down to this one
  // How peers reach the memory tier: "auto", "shm", "tcp" (see transport::TransportOptions), or "none": as gRPC
  // streams.
  std::string kv_transport = "none";
  std::string kv_listen_host = "127.0.0.1";
  TraceOptions trace;
  int num_threads = 4;                              // that may wait for the disk at the same time
  std::chrono::milliseconds drain_timeout{30'000};  // for what memory has and the disk has not yet
};

// Serves from Start to Stop. Stop drains the write-behind queue, so that a clean stop loses nothing; it may be called
// once from any thread and is implied by destruction.
class KvStoreServer {
 public:
  // Unavailable: an address is taken. InvalidArgument: an option makes no sense. Else as DiskTier::Open says.
  static absl::StatusOr<std::unique_ptr<KvStoreServer>> Start(const KvStoreOptions& options);
  ~KvStoreServer();

  std::string grpc_address() const;
  std::string metrics_address() const;
  void Stop();

 private:
  struct Parts;
  explicit KvStoreServer(std::unique_ptr<Parts> parts);
  const std::unique_ptr<Parts> parts_;
};

}  // namespace spl::kvstore
