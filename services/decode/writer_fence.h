// Whether the prefill worker that was to write a ticket's pages can still write them (docs/decisions/0002).
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

// Who may write a ticket's pages, as far as this worker knows.
struct TicketWriter {
  // The channel, by its address at the writer. Empty: it cannot be seen from here.
  std::string channel_address;
  std::string grpc_address;                    // where RevokeTicket is answered; empty: nobody can be asked
  uint64_t epoch = 0;                          // likewise
  std::chrono::steady_clock::time_point seen;  // the channel was there, or had been
  // A reservation that names nobody: over any connection that was there before, a ttl past its end.
  std::chrono::steady_clock::time_point anybody_before;
};

// Answers a ticket table's questions about a writer. Any thread may call; tests have their own.
class WriterProofs {
 public:
  virtual ~WriterProofs() = default;
  // True: no write of this writer can reach a page of this worker any more.
  virtual bool Gone(const TicketWriter& writer) const = 0;
  // Asks the writer to let go of the ticket and never to begin with it. `on_quiet` runs once, on another thread, when
  // it said that it has; not at all otherwise. False: it cannot be asked now.
  virtual bool Ask(const TicketWriter& writer, const RandomId& ticket, std::function<void()> on_quiet) = 0;
  // Begins to tear down the writer's channel; false when that is not in this worker's power.
  virtual bool Cut(const TicketWriter& writer) = 0;
};

struct WriterFenceOptions {
  std::chrono::milliseconds rpc_timeout{2'000};
  size_t max_asking = 64;              // calls under way
  std::shared_ptr<const PeerTls> tls;  // of the calls; null: without
};

// Proofs from the transport's own connections, and from RevokeTicket. Thread-safe.
class WriterFence final : public WriterProofs {
 public:
  // `transport` may be null: no channel is seen then.
  WriterFence(transport::KvTransport* transport, const WriterFenceOptions& options)
      : transport_(transport), options_(options) {}
  ~WriterFence() override;  // Stop() must have been called

  // The writer that a reservation names. Its channel is taken note of only if it is there or has been: an address that
  // something between the two rewrites would look like one that is gone. A router may name a writer that has died since
  // it looked; such a ticket's pages are free as soon as it is given up.
  TicketWriter Note(const v1::KvWriter& writer, std::chrono::milliseconds ttl) const;

  bool Gone(const TicketWriter& writer) const override;
  bool Ask(const TicketWriter& writer, const RandomId& ticket, std::function<void()> on_quiet) override;
  bool Cut(const TicketWriter& writer) override;

  // Ends the calls under way and waits for their callbacks. Ask is refused from then on.
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
