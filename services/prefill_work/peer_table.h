// The decode workers that this prefill worker can write to.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/base/bounded_queue.h"
#include "services/base/tls.h"
#include "services/base/trace.h"
#include "services/engine/engine.h"
#include "services/prefill_work/page_sender.h"
#include "services/transport/bandwidth.h"
#include "services/transport/kv_transport.h"
#include "spl/v1/decode.grpc.pb.h"

namespace spl::prefill {

// Commit at a decode worker of the same process. Calls `done`, before it returns or from another thread.
using CommitCall =
    std::function<void(const v1::CommitRequest&, const TraceContext& trace, std::function<void(absl::Status)> done)>;

// One connected decode worker. Immutable; the channel may be lost at any time (see its status).
struct Peer {
  v1::DecodeEndpoint endpoint;
  std::shared_ptr<transport::KvChannel> channel;
  uint64_t channel_id = 0;  // random; a ticket reserved for another channel is never written over this one
  std::shared_ptr<v1::Decode::Stub> decode;  // for Commit and Release
  CommitCall commit;                         // in the place of the stub's; null: another process
  // Measured at connection, on the path that is used: the rate of large writes, and the additional cost of each write.
  double bytes_per_s = 0;
  double write_s = 0;
  // Paths other than the plain one from host memory.
  StagingPages* staging = nullptr;           // for a prefill worker on a GPU
  std::unique_ptr<PinnedPeerMemory> mapped;  // the same, with a decode worker on this host
  std::unique_ptr<RemotePool> device_pool;   // the decode worker's pool on GPUs, if ours can reach it

  // Set when a push could not be flushed: the table then closes the peer, so that the decode worker sees the end of the
  // writes.
  mutable std::atomic<bool> given_up{false};

  bool usable() const { return !given_up && channel->status().ok(); }
  std::unique_ptr<PageSender> MakeSender() const;
  std::string carrier() const { return MakeSender()->carrier(); }
  // Call when nothing new is sent; no write is in flight when it returns. The channel of a device pool closes only with
  // the last owner of this object: copies between devices do not go through it, and the decode worker takes its end for
  // the end of all writes.
  void Close() const;
  // Empty if this worker writes past the channel, and the decode worker could mistake the channel's end for that of the
  // writes.
  std::string channel_address() const;
};

struct PeerOptions {
  StagingPages* staging = nullptr;     // needed if the model is on a GPU; must outlive the table
  bool use_device = true;              // write a pool on a GPU directly if possible
  bool require_device = false;         // refuse every other path
  std::shared_ptr<const PeerTls> tls;  // for the calls (Commit, Release); null: no TLS
  double min_bytes_per_s = 0;          // a slower path makes connecting the decode worker fail
  // Paths to a decode worker in the same process: into its memory, to its server, and to its Commit. Null: through the
  // transport, to the address that it advertises, and to its server.
  std::function<absl::StatusOr<std::unique_ptr<transport::KvChannel>>(const transport::RemoteMemory&)> open_memory;
  std::function<std::shared_ptr<grpc::Channel>(const std::string& address)> open_calls;
  CommitCall commit;  // past its server: the next step waits for it
};

// Owns the channels and a few threads that connect and close. Both may take seconds, and a hung decode worker must not
// delay others. Connects to one worker run one after the other. Any thread may call.
//
// A peer is one life of a decode worker. The same id with another epoch is another peer and does not replace the first,
// which goes when its channel is lost: any process can claim an id, and only the end of a connection proves the end of
// a process.
class PeerTable {
 public:
  PeerTable(transport::KvTransport& transport, std::shared_ptr<const engine::Model> model,
            const PeerOptions& options = {});
  ~PeerTable();  // Stop() must have been called

  // Connects in the background and calls `done` on one of the table's threads. Keeps a live connection to the same
  // epoch. FailedPrecondition: another page layout, other head classes, or no path that the options allow.
  // ResourceExhausted: too many connects wait, or too many peers.
  using Done = std::function<void(absl::StatusOr<std::shared_ptr<const Peer>>)>;
  absl::Status Connect(const v1::DecodeEndpoint& endpoint, Done done);

  // Unavailable: no live connection to that worker and epoch. The router then connects it and tries again.
  absl::StatusOr<std::shared_ptr<const Peer>> Find(const std::string& worker_id, uint64_t epoch) const;
  struct Connected {
    std::string worker_id;
    uint64_t channel_id = 0;
  };
  std::vector<Connected> connected() const;

  void Stop();

 private:
  struct Task {
    v1::DecodeEndpoint endpoint;
    Done done;
  };
  using PeerKey = std::pair<std::string, uint64_t>;  // worker id, epoch
  void Loop();
  void ConnectInTurn(Task task);
  void CloseLost();
  absl::StatusOr<std::shared_ptr<const Peer>> ConnectNow(const v1::DecodeEndpoint& endpoint);
  void OpenCalls(Peer& peer) const;
  absl::StatusOr<transport::WriteCost> SelfTest(transport::KvChannel& channel, const v1::DecodeEndpoint& endpoint);
  absl::StatusOr<std::unique_ptr<RemotePool>> Import(const v1::DecodeEndpoint& endpoint);
  absl::StatusOr<transport::WriteCost> DeviceSelfTest(const RemotePool& pool);

  transport::KvTransport& transport_;
  const std::shared_ptr<const engine::Model> model_;
  const PeerOptions options_;
  BoundedQueue<Task> tasks_;
  mutable std::mutex mutex_;  // guards the next two
  std::map<PeerKey, std::shared_ptr<const Peer>> peers_;
  std::map<std::string, std::deque<Task>> connecting_;  // by worker id: connects that wait for the running one
  std::vector<std::thread> threads_;
};

}  // namespace spl::prefill
