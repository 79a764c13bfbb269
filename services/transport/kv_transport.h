// Moves KV pages between workers, and chunks between workers and stores: one-sided writes into, and reads from,
// registered memory of a peer. Knows bytes, not pages or layers.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl::transport {

struct TransportOptions {
  // "auto": shared memory to a peer on the same host, TCP or RDMA to others. "shm", "tcp": only that.
  std::string carriers = "auto";
  std::string listen_host = "127.0.0.1";  // address of the listener; port 0 picks a free one
  uint16_t listen_port = 0;
  std::string advertise_host;  // what peers are told instead, as when listen_host is 0.0.0.0; empty: listen_host
};

// Memory that peers may write and read. Zeroed, page-aligned, at a fixed address. Must not outlive its transport.
class RegisteredMemory {
 public:
  virtual ~RegisteredMemory() = default;
  virtual std::byte* data() const = 0;
  virtual size_t size() const = 0;
  virtual const std::string& packed_rkey() const = 0;  // opaque bytes for RemoteMemory.rkey
};

// What a writer needs to know of a peer's memory. Travels in protos.
struct RemoteMemory {
  std::string address;  // "host:port" of the peer's listener
  std::string rkey;
  uint64_t base = 0;  // the peer's virtual address of its RegisteredMemory
  uint64_t size = 0;
  std::string host_id;  // HostId() of the peer
};

// Until when the pieces of a write may start (decision 0002).
using LeaseEnd = std::chrono::steady_clock::time_point;
inline constexpr LeaseEnd kNoLease = LeaseEnd::max();

struct PutOp {
  const std::byte* local = nullptr;
  uint64_t remote_offset = 0;  // from RemoteMemory.base
  size_t bytes = 0;
};

// A write whose source only a copier can read: memory of a device.
struct MappedWrite {
  std::byte* to = nullptr;  // in the peer's memory, mapped here
  const std::byte* from = nullptr;
  size_t bytes = 0;
};
using Copier = std::function<absl::Status(std::span<const MappedWrite>)>;

struct GetOp {
  std::byte* local = nullptr;
  uint64_t remote_offset = 0;  // from RemoteMemory.base
  size_t bytes = 0;
};

// A connection to one peer's memory. Any thread may call; calls are queued to the transport's progress thread (a queue
// of bounded length: a full one makes Put return ResourceExhausted).
class KvChannel {
 public:
  virtual ~KvChannel() = default;

  // Starts the writes; `local` must stay unchanged until done runs. done runs once, on the progress thread, with OK
  // when the source memory may be reused (not yet: the bytes are visible; see Flush), or Unavailable when the peer is
  // lost. InvalidArgument (returned, done does not run): an op outside the remote memory.
  //
  // `lease_end` is checked for each piece just before that piece is written or posted. A late piece and the rest of its
  // job are dropped, done gets DeadlineExceeded, and the channel is lost: a process that was paused long enough to miss
  // a lease has other late writes queued behind it.
  virtual absl::Status Put(std::vector<PutOp> ops, std::function<void(absl::Status)> done,
                           LeaseEnd lease_end = kNoLease) = 0;

  // The peer's memory where this process can write it itself (shared memory), or nothing. For page-locking; written
  // only through the two Puts, and gone with Close.
  virtual std::span<std::byte> mapped_memory() const = 0;
  // As Put, with sources that only `copier` can read: it runs on the transport's copy thread in turn with other writes
  // and returns when the bytes are written. FailedPrecondition without mapped memory.
  virtual absl::Status PutThrough(Copier copier, std::vector<PutOp> ops, std::function<void(absl::Status)> done,
                                  LeaseEnd lease_end = kNoLease) = 0;

  // Starts the reads; nothing but the channel may touch `local` until done runs, which it does once, on the progress
  // thread: OK when the bytes are there, Unavailable when the peer is lost (some may be there). What a peer writes at
  // the same time is read in any mixture: agree on who owns the bytes first, and checksum them. InvalidArgument as Put.
  virtual absl::Status Get(std::vector<GetOp> ops, std::function<void(absl::Status)> done) = 0;

  // done runs when every earlier Put of this channel is complete and visible in the peer's memory.
  virtual absl::Status Flush(std::function<void(absl::Status)> done) = 0;

  // Blocking form of Flush with a deadline. DeadlineExceeded leaves the channel usable.
  virtual absl::Status FlushAndWait(std::chrono::nanoseconds timeout) = 0;

  // Closes and returns only when no write of this channel can reach the peer any more (writer provably quiet) and no
  // read can reach local memory, or DeadlineExceeded. Pending done callbacks run with Cancelled first.
  virtual absl::Status Close(std::chrono::nanoseconds timeout) = 0;

  virtual std::string carrier() const = 0;  // "shm", "tcp", "rdma"
  // "host:port" from which the connection was made: what the peer's transport knows it by, unless something between the
  // two rewrites addresses. Empty: there is no connection.
  virtual std::string local_address() const = 0;
  virtual absl::Status status() const = 0;  // Unavailable once the peer is lost
};

// Owns the UCX context, the listener, and one progress thread that sleeps when nothing moves (event mode).
// Stop() ends the thread and closes every channel; call it before destruction.
class KvTransport {
 public:
  static absl::StatusOr<std::unique_ptr<KvTransport>> Create(const TransportOptions& options);
  virtual ~KvTransport() = default;

  virtual absl::StatusOr<std::unique_ptr<RegisteredMemory>> Allocate(size_t bytes) = 0;
  virtual std::string listen_address() const = 0;  // "host:port" for peers, the real port
  // Unavailable / DeadlineExceeded when the peer cannot be reached within the timeout; FailedPrecondition when the only
  // carrier that works is not one the options allow.
  virtual absl::StatusOr<std::unique_ptr<KvChannel>> Connect(const RemoteMemory& remote,
                                                             std::chrono::nanoseconds timeout) = 0;

  // Connections that were opened at this transport before `opened_before` and over which the channel with that
  // local_address may still write its memory. None left proves that no write of the channel can arrive, if one was
  // there before: that of a live peer counts until the peer has closed it behind its last write, that of a dead one
  // until the kernel has closed it. An empty address: those of all peers.
  struct WriterConnections {
    size_t over_network = 0;  // CutWriter ends them
    size_t mapped = 0;        // the peer has the memory mapped: only the peer's own close, or its death, ends them
    bool known = false;       // there is or was one with that address, as far as 4,096 that ended are remembered
    size_t all() const { return over_network + mapped; }
  };
  virtual WriterConnections ConnectionsOf(const std::string& channel_address,
                                          std::chrono::steady_clock::time_point opened_before) const = 0;
  // Begins to tear down those over the network. ConnectionsOf counts them until nothing of them can arrive.
  virtual void CutWriter(const std::string& channel_address, std::chrono::steady_clock::time_point opened_before) = 0;

  virtual void Stop() = 0;
};

// Identifies the host and IPC namespace: equal strings mean that shared memory between the two processes is possible.
std::string HostId();

}  // namespace spl::transport
