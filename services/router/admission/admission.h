// How many requests run and how many may wait. The queue is the only place where a request waits for room.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include "absl/status/status.h"
#include "services/base/metrics.h"
#include "services/router/admission/fair_queue.h"

namespace spl::router {

struct AdmissionOptions {
  size_t max_running = 4096;  // dispatched and not finished; a cap on memory, the decode workers refuse on their own
  size_t max_queue = 1024;    // waiting for room
  FairQueueOptions order;
  // Read for ageing and for Retry-After.
  std::function<std::chrono::steady_clock::time_point()> now = [] { return std::chrono::steady_clock::now(); };
};

// Who waits goes in the order of FairQueue. Thread-safe; callbacks run on the thread that made room, outside the lock,
// and must only post.
//
// A request is admitted at once while nobody waits. When every decode worker refuses one for lack of room it goes to
// the head of the queue (WaitForRoom) and the queue stands still until room may have become free: a request has left,
// or a poll brought news. Then one request at a time tries (Reserved lets the next one go), so that a full cluster is
// probed by one request and not by a thousand.
class Admission {
 public:
  Admission(const AdmissionOptions& options, Metrics& metrics);

  // Calls request.start now or later. ResourceExhausted with a retry-after when the queue is full of the requests of
  // this tenant, or of many: a tenant with fewer of them takes the place of the last of the one with the most, whose
  // `refuse` gets that status; it then still has to Leave. Unavailable when closed.
  absl::Status Enter(QueuedRequest request);
  // The request that runs found no room. ResourceExhausted as above; the request then still has to Leave.
  absl::Status WaitForRoom(QueuedRequest request);
  // The request that runs has its place.
  void Reserved(uint64_t id);
  // The request is over, wherever it was.
  void Leave(uint64_t id);
  // Room may have become free.
  void OnRoom();
  // Refuses everything new from now on.
  void Close();
  bool closed() const;

  size_t num_running() const;
  size_t num_waiting() const;

 private:
  using Clock = std::chrono::steady_clock;
  // Takes the next request from the queue if one may go. Caller holds mutex_ and runs the result after unlocking.
  std::function<void()> NextLocked();
  absl::Status FullLocked() const;
  void UpdateGaugesLocked();

  const AdmissionOptions options_;
  prometheus::Gauge& running_gauge_;
  prometheus::Gauge& waiting_gauge_;
  prometheus::Gauge& depth_gauge_;
  prometheus::Counter& rejections_;
  mutable std::mutex mutex_;                       // guards all below
  std::map<uint64_t, Clock::time_point> running_;  // id → since when
  FairQueue queue_;
  std::optional<uint64_t> probing_;  // came from the queue and has not found a place yet
  bool blocked_ = false;             // the last probe found no room
  bool closed_ = false;
  double mean_seconds_ = 1.0;  // smoothed duration of a request
};

}  // namespace spl::router
