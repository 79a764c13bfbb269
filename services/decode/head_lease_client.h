// The decode worker's end of leases: keeps them alive, fetches heads under them, gives them back.
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
  // to them, as those of a ticket do; as much time later the prefill worker's channel is torn down for it.
  std::chrono::milliseconds fetch_timeout{5'000};
  std::chrono::milliseconds rpc_timeout{2'000};  // of renewals and releases
  std::shared_ptr<const PeerTls> tls;            // of all calls; null: without
};

// Owns one thread, on which renewals are sent and checksums compared. Any thread may call Open; leases are used and
// dropped on the engine's.
class HeadLeaseClient {
 public:
  // `worker_id` and `epoch` are what prefill workers know this worker by.
  // `fence` outlives it.
  HeadLeaseClient(const HeadLeaseOptions& options, std::string worker_id, uint64_t epoch, WriterFence& fence);
  ~HeadLeaseClient();  // Stop() must have been called

  // A lease that a prefill worker gave with a commit. Dropping the last owner releases it. May outlive Stop, not this.
  std::shared_ptr<engine::HeadSource> Open(const v1::HeadLease& lease, std::vector<engine::KeySummary> summaries);
  size_t num_fetching() const;  // fetches under way, and those whose pages must wait
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
  // `quarantined`: where the pages wait if they may still be written.
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
