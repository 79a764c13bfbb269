// The decode workers that this prefill worker can write to.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/base/bounded_queue.h"
#include "services/base/tls.h"
#include "services/engine/engine.h"
#include "services/prefill/page_sender.h"
#include "services/transport/bandwidth.h"
#include "services/transport/kv_transport.h"
#include "spl/v1/decode.grpc.pb.h"

namespace spl::prefill {

// One connected decode worker. Immutable; the channel may be lost at any time (see its status).
struct Peer {
  v1::DecodeEndpoint endpoint;
  std::shared_ptr<transport::KvChannel> channel;
  std::shared_ptr<v1::Decode::Stub> decode;  // for Commit and Release
  // Measured when it was connected, on the way that is used: the rate of large writes, and what each write adds.
  double bytes_per_s = 0;
  double write_s = 0;
  // Ways that are not the plain one from host memory.
  StagingPages* staging = nullptr;           // of a prefill worker on a GPU
  std::unique_ptr<PinnedPeerMemory> mapped;  // likewise, of a decode worker on this host
  std::unique_ptr<RemotePool> device_pool;   // the decode worker's pool on GPUs, when ours reach it

  std::unique_ptr<PageSender> MakeSender() const;
  std::string carrier() const { return MakeSender()->carrier(); }
  void Close() const;  // once nothing new is sent; no write is on its way when it returns
};

struct PeerOptions {
  StagingPages* staging = nullptr;     // needed when the model is on a GPU; outlives the table
  bool use_device = true;              // write a pool on a GPU directly where that is possible
  bool require_device = false;         // and refuse every other way
  std::shared_ptr<const PeerTls> tls;  // of the calls (Commit, Release); null: without
  double min_bytes_per_s = 0;          // a slower way is an error when the decode worker is connected
  // Ways to a decode worker in the same process: into its memory, and to its server. Null: over the transport, and to
  // the address that it says.
  std::function<absl::StatusOr<std::unique_ptr<transport::KvChannel>>(const transport::RemoteMemory&)> open_memory;
  std::function<std::shared_ptr<grpc::Channel>(const std::string& address)> open_calls;
};

// Owns the channels and one thread that connects and closes, because both may take seconds. Any thread may call.
class PeerTable {
 public:
  PeerTable(transport::KvTransport& transport, std::shared_ptr<const engine::Model> model,
            const PeerOptions& options = {});
  ~PeerTable();  // Stop() must have been called

  // Connects in the background and calls `done` on the table's thread. A live connection to the same epoch is kept.
  // FailedPrecondition: another page layout, other head classes, or no way that the options allow. ResourceExhausted:
  // too many connects wait.
  using Done = std::function<void(absl::StatusOr<std::shared_ptr<const Peer>>)>;
  absl::Status Connect(const v1::DecodeEndpoint& endpoint, Done done);

  // Unavailable when there is no live connection to that worker and epoch: the router connects it and tries again.
  absl::StatusOr<std::shared_ptr<const Peer>> Find(const std::string& worker_id, uint64_t epoch) const;
  std::vector<std::string> ConnectedIds() const;

  void Stop();

 private:
  struct Task {
    v1::DecodeEndpoint endpoint;
    Done done;
  };
  void Loop();
  absl::StatusOr<std::shared_ptr<const Peer>> ConnectNow(const v1::DecodeEndpoint& endpoint);
  absl::StatusOr<transport::WriteCost> SelfTest(transport::KvChannel& channel, const v1::DecodeEndpoint& endpoint);
  absl::StatusOr<std::unique_ptr<RemotePool>> Import(const v1::DecodeEndpoint& endpoint);
  absl::StatusOr<transport::WriteCost> DeviceSelfTest(const RemotePool& pool);

  transport::KvTransport& transport_;
  const std::shared_ptr<const engine::Model> model_;
  const PeerOptions options_;
  BoundedQueue<Task> tasks_;
  mutable std::mutex mutex_;                                  // guards peers_
  std::map<std::string, std::shared_ptr<const Peer>> peers_;  // by worker id
  std::thread thread_;
};

}  // namespace spl::prefill
