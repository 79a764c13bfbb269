// The router's picture of its workers: polls them, connects prefill to decode workers, publishes snapshots.
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
  // Who the workers are. Null: the two lists below, for good.
  std::shared_ptr<membership::Discovery> discovery;
  std::vector<std::string> prefill;  // HOST:PORT
  std::vector<std::string> decode;
  std::shared_ptr<const PeerTls> tls;  // null: workers are called without
  // A worker that hangs is lost at most poll_interval + poll_timeout + confirm_timeout after it answered last: below a
  // second. It takes two silent polls, so that a router which was itself kept from running does not lose its workers:
  // at the first one's deadline all that came meanwhile is read, and the second finds it. A refused connection counts
  // at once.
  std::chrono::milliseconds poll_interval{200};
  std::chrono::milliseconds poll_timeout{400};
  std::chrono::milliseconds confirm_timeout{300};     // of the second poll, sent at once
  std::chrono::milliseconds connect_timeout{15'000};  // of ConnectPeer: it includes a self-test
  std::chrono::milliseconds connect_retry{1'000};
  std::shared_ptr<CacheView>
      caches;  // filled with what the prefill workers say that they have; null: they are not asked
};

// Owns the channels. Everything it does runs on a strand of the given io_context and on gRPC's threads; nothing blocks.
// Thread-safe. Stop before the io_context stops.
class Fleet : public std::enable_shared_from_this<Fleet> {
 public:
  struct Listener {
    // A worker that answered no longer does; its requests must go elsewhere.
    std::function<void(const std::string& worker_id)> on_lost;
    // A poll brought news; room may have become free.
    std::function<void()> on_refresh;
  };

  // All calls to workers, those of requests too, are entered in `calls`.
  static std::shared_ptr<Fleet> Create(boost::asio::io_context& io, FleetOptions options,
                                       std::shared_ptr<CallTracker> calls, Metrics& metrics);
  virtual ~Fleet() = default;

  virtual void Start(Listener listener) = 0;
  virtual void Stop() = 0;
  // A call to the worker failed as if it were gone: nothing new is sent there until the next poll, which comes at once,
  // finds it again.
  virtual void ReportFailure(const std::string& worker_id) = 0;
  // The worker is polled at once, and gets requests meanwhile.
  virtual void Look(const std::string& worker_id) = 0;

  // What has become of one life of a worker. Lives that ended long ago are forgotten (kUnknown).
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
