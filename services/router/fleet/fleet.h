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
#include "services/router/fleet/snapshot.h"

namespace spl::router {

class CallTracker;

struct FleetOptions {
  std::vector<std::string> prefill;  // HOST:PORT
  std::vector<std::string> decode;
  std::chrono::milliseconds poll_interval{200};
  std::chrono::milliseconds poll_timeout{1'000};
  int failures_until_lost = 3;                        // polls that time out; a refused connection counts at once
  std::chrono::milliseconds connect_timeout{15'000};  // of ConnectPeer: it includes a self-test
  std::chrono::milliseconds connect_retry{1'000};
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
  // A call to the worker failed as if it were gone: nothing new is sent there until the next poll finds it again.
  virtual void ReportFailure(const std::string& worker_id) = 0;

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
