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
  // "auto": shared memory to a peer on the same host, TCP or RDMA to others. "shm", "tcp": only that carrier.
  std::string carriers = "auto";
  std::string listen_host = "127.0.0.1";  // address of the listener; port 0 picks a free one
  uint16_t listen_port = 0;
  // address that peers are told, for example when listen_host is 0.0.0.0; empty: listen_host
  std::string advertise_host;
};

// Memory that peers may write and read. Zeroed, page-aligned, at a fixed address. Must not outlive its transport.
class RegisteredMemory {
 public:
  virtual ~RegisteredMemory() = default;
  virtual std::byte* data() const = 0;
  virtual size_t size() const = 0;
  virtual const std::string& packed_rkey() const = 0;  // opaque bytes for RemoteMemory.rkey
};

// A peer's memory as a writer needs it. Travels in protos.
struct RemoteMemory {
  std::string address;  // "host:port" of the peer's listener
  std::string rkey;
  uint64_t base = 0;  // the peer's virtual address of its RegisteredMemory
  uint64_t size = 0;
  std::string host_id;  // HostId() of the peer
};

// Time until which the pieces of a write may start (decision 0002).
using LeaseEnd = std::chrono::steady_clock::time_point;
inline constexpr LeaseEnd kNoLease = LeaseEnd::max();

struct PutOp {
  const std::byte* local = nullptr;
  uint64_t remote_offset = 0;  // from RemoteMemory.base
  size_t bytes = 0;
};

// A write whose source only a copier can read: device memory.
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

// A connection to one peer's memory. Any thread may call. Calls go to a bounded queue of the transport's progress
// thread; if it is full, Put returns ResourceExhausted.
class KvChannel {
 public:
  virtual ~KvChannel() = default;

  // Starts the writes; `local` must stay unchanged until done runs. done runs once, on the progress thread. OK: the
  // source memory may be reused (the bytes need not be visible yet; see Flush). Unavailable: the peer is lost.
  // InvalidArgument (returned; done does not run): an op outside the remote memory.
  //
  // `lease_end` is checked for each piece, just before it is written or posted. A late piece and the rest of its job
  // are dropped, done gets DeadlineExceeded, and the channel is lost: a process that was paused long enough to miss a
  // lease has other late writes queued after it.
  virtual absl::Status Put(std::vector<PutOp> ops, std::function<void(absl::Status)> done,
                           LeaseEnd lease_end = kNoLease) = 0;

  // The peer's memory if this process can write it directly (shared memory); otherwise empty. For page-locking only:
  // write it through the two Puts. Invalid after Close.
  virtual std::span<std::byte> mapped_memory() const = 0;
  // As Put, for sources that only `copier` can read. copier runs on the transport's copy thread, in turn with other
  // writes, and returns when the bytes are written. FailedPrecondition: no mapped memory.
  virtual absl::Status PutThrough(Copier copier, std::vector<PutOp> ops, std::function<void(absl::Status)> done,
                                  LeaseEnd lease_end = kNoLease) = 0;

  // Starts the reads. Only the channel may touch `local` until done runs, once, on the progress thread. OK: the bytes
  // are there. Unavailable: the peer is lost, and some bytes may be there. Bytes that the peer writes at the same time
  // arrive in any mixture: agree on who owns the bytes first, and checksum them. InvalidArgument as for Put.
  virtual absl::Status Get(std::vector<GetOp> ops, std::function<void(absl::Status)> done) = 0;

  // done runs when every earlier Put of this channel is complete and visible in the peer's memory.
  virtual absl::Status Flush(std::function<void(absl::Status)> done) = 0;

  // Blocking form of Flush with a deadline. DeadlineExceeded leaves the channel usable.
  virtual absl::Status FlushAndWait(std::chrono::nanoseconds timeout) = 0;

  // Closes the channel. OK: no write of this channel can reach the peer any more (the writer is provably quiet), and no
  // read can reach local memory. DeadlineExceeded: not yet. Pending done callbacks run first, with Cancelled.
  virtual absl::Status Close(std::chrono::nanoseconds timeout) = 0;

  virtual std::string carrier() const = 0;  // "shm", "tcp", "rdma"
  // "host:port" from which the connection was made. The peer's transport knows the channel by it, unless something in
  // between rewrites addresses. Empty: no connection.
  virtual std::string local_address() const = 0;
  virtual absl::Status status() const = 0;  // Unavailable once the peer is lost
};

// Owns the UCX context, the listener, and one progress thread that sleeps when nothing moves (event mode).
// Stop() ends the thread and closes every channel; call it before destruction.
class KvTransport {
 public:
  static absl::StatusOr<std::unique_ptr<KvTransport>> Create(const TransportOptions& options);
  virtual ~KvTransport() = default;

  // How peers on this host reach the memory. kByPeers: they map it. The kernel gives such memory in pages of 4 KiB, as
  // a rule, through which the pages of a pool are read several times as slowly. kNone: as other hosts do.
  enum class Mapping { kByPeers, kNone };
  // Zeroed. InvalidArgument: 0 bytes. ResourceExhausted: there is not that much memory.
  virtual absl::StatusOr<std::unique_ptr<RegisteredMemory>> Allocate(size_t bytes, Mapping mapping) = 0;
  absl::StatusOr<std::unique_ptr<RegisteredMemory>> Allocate(size_t bytes) {
    return Allocate(bytes, Mapping::kByPeers);
  }
  virtual std::string listen_address() const = 0;  // "host:port" for peers, the real port
  // Unavailable, DeadlineExceeded: the peer cannot be reached within the timeout. FailedPrecondition: the only carrier
  // that works is not allowed by the options.
  virtual absl::StatusOr<std::unique_ptr<KvChannel>> Connect(const RemoteMemory& remote,
                                                             std::chrono::nanoseconds timeout) = 0;

  // Connections that were opened at this transport before `opened_before`, and over which the channel with the given
  // local_address may still write its memory. Empty address: those of all peers. If there was a connection before, none
  // left proves that no write of the channel can arrive any more. A connection of a live peer counts until the peer has
  // closed it after its last write, one of a dead peer until the kernel has closed it.
  struct WriterConnections {
    size_t over_network = 0;  // CutWriter ends them
    size_t mapped = 0;        // the peer has mapped the memory: only its own close, or its death, ends them
    bool known = false;       // such a connection exists or existed; the last 4,096 ended ones are remembered
    size_t all() const { return over_network + mapped; }
  };
  virtual WriterConnections ConnectionsOf(const std::string& channel_address,
                                          std::chrono::steady_clock::time_point opened_before) const = 0;
  // Starts to tear down those over the network. ConnectionsOf counts them until nothing from them can arrive.
  virtual void CutWriter(const std::string& channel_address, std::chrono::steady_clock::time_point opened_before) = 0;

  virtual void Stop() = 0;
};

// Identifies the host and IPC namespace: equal strings mean that shared memory between the two processes is possible.
std::string HostId();

}  // namespace spl::transport
