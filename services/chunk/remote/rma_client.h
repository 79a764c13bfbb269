// The client half of moving chunks by remote memory access: leases, reservations, and the transfers between them.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "services/chunk/chunk.h"
#include "services/chunk/remote/detached_calls.h"
#include "services/transport/kv_transport.h"
#include "spl/v1/kvstore.grpc.pb.h"

namespace spl::chunk {

// One store's memory as this process reaches it: connected when first used and again after a loss, at most every few
// seconds. Borrows the transport. Any thread may call; calls share the channel.
class RmaClient {
 public:
  RmaClient(const std::shared_ptr<grpc::ChannelInterface>& channel, transport::KvTransport& transport,
            std::string address);

  // What a call has done, and why it did not do more. Unless `finished`, the caller goes on by other means from
  // `accepted` on: `status` is then about the path, not about the chunks.
  struct Fetched {
    size_t accepted = 0;
    bool finished = false;
    absl::Status status;
  };
  // FetchLeading of ChunkStore. Nothing is written to the pieces after it has returned.
  Fetched Fetch(std::span<const ChunkKey> keys, std::chrono::steady_clock::time_point deadline,
                const ChunkStore::PlaceFn& place, const ChunkStore::FetchedFn& sink);

  struct Stored {
    PutReport report;
    size_t num_done = 0;  // of the chunks, from the first on
    bool finished = false;
    absl::Status status;
  };
  Stored Put(std::span<const Chunk* const> chunks, const PutOptions& options,
             std::chrono::steady_clock::time_point deadline);

  std::string carrier() const;  // of the channel: "shm", "tcp", "rdma"; "" while there is none

 private:
  using Deadline = std::chrono::steady_clock::time_point;
  struct Connection {
    std::unique_ptr<transport::KvChannel> channel;
    std::string instance_id;
  };
  class FetchRun;

  absl::StatusOr<std::shared_ptr<Connection>> Connect(Deadline deadline);
  // Not to be used again: closed when the last call lets go of it.
  void Drop(const std::shared_ptr<Connection>& connection);
  absl::Status PutWindow(std::span<const Chunk* const> chunks, const PutOptions& options, Deadline deadline,
                         Stored& stored);
  void Abort(const std::string& reservation_id, bool writer_quiet);

  const std::unique_ptr<v1::KvStoreRma::Stub> stub_;
  transport::KvTransport& transport_;
  const std::string address_;
  mutable std::mutex mutex_;  // guards all below
  std::shared_ptr<Connection> connection_;
  Deadline not_before_{};  // after a failure
  bool failure_logged_ = false;
  DetachedCalls calls_;  // releases and aborts on their way; last, so that it ends first
};

}  // namespace spl::chunk
