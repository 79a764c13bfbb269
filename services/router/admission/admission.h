// Limits how many requests run and how many may wait. Its queue is the only place where a request waits for room.
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
  size_t max_running = 4096;  // dispatched and not finished; limits memory (decode workers refuse on their own)
  size_t max_queue = 1024;    // waiting for room
  FairQueueOptions order;
  // Used for ageing and for Retry-After.
  std::function<std::chrono::steady_clock::time_point()> now = [] { return std::chrono::steady_clock::now(); };
};

// Waiting requests go in the order of FairQueue. Thread-safe. Callbacks run on the thread that made room, outside the
// lock, and must only post.
//
// A request is admitted at once while the queue is empty. If every decode worker refuses it for lack of room, it goes
// to the head of the queue (WaitForRoom), and the queue stops until room may have become free: a request has left, or a
// poll brought news. Then one request at a time tries, and Reserved lets the next one go: a full cluster is probed by
// one request and not by a thousand.
class Admission {
 public:
  Admission(const AdmissionOptions& options, Metrics& metrics);

  // Calls request.start now or later. ResourceExhausted with a retry-after: the queue is full. A tenant with few
  // waiting requests displaces the last one of the tenant with the most; the displaced request's `refuse` gets that
  // status, and it must still call Leave. Unavailable: closed.
  absl::Status Enter(QueuedRequest request);
  // Call when a running request found no room. ResourceExhausted as above; the request must still call Leave.
  absl::Status WaitForRoom(QueuedRequest request);
  // Call when a running request has its place.
  void Reserved(uint64_t id);
  // Call when the request is over, in whatever state it was.
  void Leave(uint64_t id);
  // Call when room may have become free.
  void OnRoom();
  // Refuses all new requests from now on.
  void Close();
  bool closed() const;

  size_t num_running() const;
  size_t num_waiting() const;

 private:
  using Clock = std::chrono::steady_clock;
  // Takes the next request from the queue if one may go. The caller holds mutex_ and runs the result after unlocking.
  std::function<void()> NextLocked();
  absl::Status FullLocked() const;
  void UpdateGaugesLocked();

  const AdmissionOptions options_;
  prometheus::Gauge& running_gauge_;
  prometheus::Gauge& waiting_gauge_;
  prometheus::Gauge& depth_gauge_;
  prometheus::Counter& rejections_;
  mutable std::mutex mutex_;                       // guards all below
  std::map<uint64_t, Clock::time_point> running_;  // id → start
  FairQueue queue_;
  std::optional<uint64_t> probing_;  // came from the queue and has not found a place yet
  bool blocked_ = false;             // the last probe found no room
  bool closed_ = false;
  double mean_seconds_ = 1.0;  // smoothed duration of a request
};

}  // namespace spl::router
