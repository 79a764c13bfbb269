// The decode worker's side of head leases: keeps leases alive, fetches heads under them, releases them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "services/base/bounded_queue.h"
#include "services/base/tls.h"
#include "services/decode/writer_fence.h"
#include "services/engine/engine.h"
#include "spl/v1/prefill.grpc.pb.h"

namespace spl::decode {

struct HeadLeaseOptions {
  // A fetch that takes longer has failed. Its pages return to the pool when it is proved that nothing more is written
  // to them, like the pages of a ticket. If that takes as long again, the prefill worker's channel is torn down.
  std::chrono::milliseconds fetch_timeout{5'000};
  std::chrono::milliseconds rpc_timeout{2'000};  // for renewals and releases
  std::shared_ptr<const PeerTls> tls;            // for all calls; null: no TLS
};

// Owns one thread, which sends renewals and compares checksums. Any thread may call Open. Leases are used and dropped
// on the engine's thread.
class HeadLeaseClient {
 public:
  // `worker_id` and `epoch` identify this worker to prefill workers. `fence` must outlive this object.
  HeadLeaseClient(const HeadLeaseOptions& options, std::string worker_id, uint64_t epoch, WriterFence& fence);
  ~HeadLeaseClient();  // Stop() must have been called

  // Takes over a lease that a prefill worker gave with a commit. Dropping the last owner releases it. The lease may
  // outlive Stop, but not this object.
  std::shared_ptr<engine::HeadSource> Open(const v1::HeadLease& lease, std::vector<engine::KeySummary> summaries);
  size_t num_fetching() const;  // running fetches, and those whose pages must wait
  void Stop();

 private:
  class Lease;
  struct Quarantined {
    std::shared_ptr<engine::HeadPages> pages;
    RandomId fetch;
    TicketWriter writer;
    std::chrono::steady_clock::time_point ask_at, cut_at;
    bool cut = false;
  };
  using Stub = v1::Prefill::Stub;

  std::shared_ptr<Stub> StubOf(const std::string& address);
  void Loop();
  void StartFetch(const std::shared_ptr<Lease>& lease, std::shared_ptr<engine::HeadPages> pages,
                  std::function<void(absl::Status)> done);
  // `quarantined`: holds the pages if they may still be written.
  void EndFetch(Quarantined quarantined, const absl::Status& status, const std::function<void(absl::Status)>& done);
  void RenewDue(std::chrono::steady_clock::time_point now);
  void LookForProofs(std::chrono::steady_clock::time_point now);
  void Free(const RandomId& fetch);
  void CallStarted();
  void CallEnded();

  const HeadLeaseOptions options_;
  const std::string worker_id_;
  const uint64_t epoch_;
  WriterFence& fence_;
  BoundedQueue<std::function<void()>> tasks_;
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable idle_;
  size_t num_calls_ = 0;  // RPCs whose callback has not run
  bool stopping_ = false;
  std::map<std::string, std::shared_ptr<Stub>> stubs_;  // by address
  std::vector<std::weak_ptr<Lease>> leases_;
  std::list<Quarantined> quarantined_;
  size_t num_fetching_ = 0;
  std::thread thread_;
};

}  // namespace spl::decode
