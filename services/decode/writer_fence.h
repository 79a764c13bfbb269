// Proves whether the prefill worker of a ticket can still write the ticket's pages (docs/decisions/0002).
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "services/base/ids.h"
#include "services/base/tls.h"
#include "services/transport/kv_transport.h"
#include "spl/v1/prefill.grpc.pb.h"

namespace spl::decode {

// The writer of a ticket's pages, as far as this worker knows.
struct TicketWriter {
  // The channel, by its address on the writer's side. Empty: this worker cannot see it.
  std::string channel_address;
  std::string grpc_address;                    // address that serves RevokeTicket; empty: the writer cannot be asked
  uint64_t epoch = 0;                          // epoch of the process behind grpc_address
  std::chrono::steady_clock::time_point seen;  // time at which the channel existed, or had existed
  // For a reservation without a writer: any connection from before this time may be the writer's (two ttl after the
  // reservation).
  std::chrono::steady_clock::time_point anybody_before;
};

// Answers a ticket table's questions about a writer. Any thread may call. Tests have their own implementations.
class WriterProofs {
 public:
  virtual ~WriterProofs() = default;
  // True: no write of this writer can reach a page of this worker any more.
  virtual bool Gone(const TicketWriter& writer) const = 0;
  // Asks the writer to end its writes to the ticket and never to start another. `on_quiet` runs once, on another
  // thread, when the writer confirms; otherwise it never runs. False: the writer cannot be asked now.
  virtual bool Ask(const TicketWriter& writer, const RandomId& ticket, std::function<void()> on_quiet) = 0;
  // Starts to tear down the writer's channel. False: this worker cannot do that.
  virtual bool Cut(const TicketWriter& writer) = 0;
};

struct WriterFenceOptions {
  std::chrono::milliseconds rpc_timeout{2'000};
  size_t max_asking = 64;              // calls in flight
  std::shared_ptr<const PeerTls> tls;  // for the calls; null: no TLS
};

// Proofs from the transport's connections and from RevokeTicket. Thread-safe.
class WriterFence final : public WriterProofs {
 public:
  // `transport` may be null: then no channel is seen.
  WriterFence(transport::KvTransport* transport, const WriterFenceOptions& options)
      : transport_(transport), options_(options) {}
  ~WriterFence() override;  // Stop() must have been called

  // Returns the writer that a reservation names. Records its channel only if the transport knows it: an address that
  // something in between has rewritten would look like a channel that is gone. A router may name a writer that has died
  // since the router looked; the pages of such a ticket are free as soon as it is given up.
  TicketWriter Note(const v1::KvWriter& writer, std::chrono::milliseconds ttl) const;

  bool Gone(const TicketWriter& writer) const override;
  bool Ask(const TicketWriter& writer, const RandomId& ticket, std::function<void()> on_quiet) override;
  bool Cut(const TicketWriter& writer) override;

  // Ends the calls in flight and waits for their callbacks. Later calls of Ask are refused.
  void Stop();

 private:
  std::shared_ptr<v1::Prefill::Stub> StubOfLocked(const std::string& address);

  transport::KvTransport* const transport_;
  const WriterFenceOptions options_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable idle_;
  bool stopping_ = false;
  size_t num_asking_ = 0;
  std::map<std::string, std::shared_ptr<v1::Prefill::Stub>> stubs_;  // by address
};

}  // namespace spl::decode
