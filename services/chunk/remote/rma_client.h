// Client half of moving chunks by remote memory access (RMA): leases, reservations, and the transfers between them.
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

// Access to one store's memory: connects at first use and again after a loss, at most every few seconds. Borrows the
// transport. Any thread may call; calls share the channel.
class RmaClient {
 public:
  RmaClient(const std::shared_ptr<grpc::ChannelInterface>& channel, transport::KvTransport& transport,
            std::string address);

  // Progress of a call. Unless `finished`, the caller continues with chunk `accepted` by other means; `status` then
  // describes the path, not the chunks.
  struct Fetched {
    size_t accepted = 0;
    bool finished = false;
    absl::Status status;
  };
  // As ChunkStore::FetchLeading. Nothing is written to the pieces after it has returned.
  Fetched Fetch(std::span<const ChunkKey> keys, std::chrono::steady_clock::time_point deadline,
                const ChunkStore::PlaceFn& place, const ChunkStore::FetchedFn& sink);

  struct Stored {
    PutReport report;
    size_t num_done = 0;  // leading chunks that are done
    bool finished = false;
    absl::Status status;
  };
  Stored Put(std::span<const Chunk* const> chunks, const PutOptions& options,
             std::chrono::steady_clock::time_point deadline);

  std::string carrier() const;  // the channel's: "shm", "tcp", "rdma"; "" while there is none

 private:
  using Deadline = std::chrono::steady_clock::time_point;
  struct Connection {
    std::unique_ptr<transport::KvChannel> channel;
    std::string instance_id;
  };
  class FetchRun;

  absl::StatusOr<std::shared_ptr<Connection>> Connect(Deadline deadline);
  // Retires the connection: it closes when the last call releases it.
  void Drop(const std::shared_ptr<Connection>& connection);
  absl::Status PutWindow(std::span<const Chunk* const> chunks, const PutOptions& options, Deadline deadline,
                         Stored& stored);
  void Abort(const std::string& reservation_id, bool writer_quiet);

  const std::unique_ptr<v1::KvStoreRma::Stub> stub_;
  transport::KvTransport& transport_;
  const std::string address_;
  mutable std::mutex mutex_;  // guards all below
  std::shared_ptr<Connection> connection_;
  Deadline not_before_{};  // earliest time of the next attempt after a failure
  bool failure_logged_ = false;
  DetachedCalls calls_;  // running releases and aborts; last member, so that it ends first
};

}  // namespace spl::chunk
