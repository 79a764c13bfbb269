// The router's view of its workers: polls them, connects prefill to decode workers, publishes snapshots.
#pragma once

#include <boost/asio/io_context.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "services/base/metrics.h"
#include "services/base/tls.h"
#include "services/membership/membership.h"
#include "services/router/fleet/snapshot.h"

namespace spl::router {

class CacheView;
class CallTracker;

struct FleetOptions {
  // The source of workers. Null: the two lists below, which never change.
  std::shared_ptr<membership::Discovery> discovery;
  std::vector<std::string> prefill;  // HOST:PORT
  std::vector<std::string> decode;
  std::shared_ptr<const PeerTls> tls;  // null: no TLS
  // A worker that hangs is lost at most poll_interval + poll_timeout + confirm_timeout after its last answer, which is
  // below a second. It takes two silent polls, so that a router which was itself kept from running does not lose its
  // workers: at the first poll's deadline it reads everything that has arrived, and the second poll finds the worker. A
  // refused connection counts at once.
  std::chrono::milliseconds poll_interval{200};
  std::chrono::milliseconds poll_timeout{400};
  std::chrono::milliseconds confirm_timeout{300};     // for the second poll, sent at once
  std::chrono::milliseconds connect_timeout{15'000};  // for ConnectPeer, which includes a self-test
  std::chrono::milliseconds connect_retry{1'000};
  std::shared_ptr<CacheView> caches;  // filled from the prefill workers' reports; null: they are not asked
};

// Owns the channels. Runs on a strand of the given io_context and on gRPC's threads; never blocks. Thread-safe. Call
// Stop before the io_context stops.
class Fleet : public std::enable_shared_from_this<Fleet> {
 public:
  struct Listener {
    // A worker that answered no longer does; its requests must move.
    std::function<void(const std::string& worker_id)> on_lost;
    // A poll brought news; room may have become free.
    std::function<void()> on_refresh;
  };

  // All calls to workers, including those of requests, are entered in `calls`.
  static std::shared_ptr<Fleet> Create(boost::asio::io_context& io, FleetOptions options,
                                       std::shared_ptr<CallTracker> calls, Metrics& metrics);
  virtual ~Fleet() = default;

  virtual void Start(Listener listener) = 0;
  virtual void Stop() = 0;
  // Reports a call that failed as if the worker were gone: nothing new is sent there until the next poll, which comes
  // at once, finds it again.
  virtual void ReportFailure(const std::string& worker_id) = 0;
  // Polls the worker at once; it still gets requests in the meantime.
  virtual void Look(const std::string& worker_id) = 0;

  // The fate of one life of a worker. Lives that ended long ago are forgotten (kUnknown).
  enum class Fate { kUnknown, kAlive, kLost };
  // kAlive: it has answered a poll that was sent after `since`.
  virtual Fate FateOf(const std::string& worker_id, uint64_t epoch,
                      std::chrono::steady_clock::time_point since) const = 0;

  std::shared_ptr<const FleetSnapshot> snapshot() const {
    std::lock_guard lock(snapshot_mutex_);
    return snapshot_;
  }

 protected:
  void Publish(std::shared_ptr<const FleetSnapshot> snapshot) {
    std::lock_guard lock(snapshot_mutex_);
    snapshot_ = std::move(snapshot);
  }

 private:
  mutable std::mutex snapshot_mutex_;  // guards the pointer only (std::atomic<shared_ptr> is opaque to TSan)
  std::shared_ptr<const FleetSnapshot> snapshot_ = std::make_shared<FleetSnapshot>();
};

}  // namespace spl::router
