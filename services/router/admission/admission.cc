#include "services/router/admission/admission.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "services/router/request/api_error.h"

namespace spl::router {

Admission::Admission(const AdmissionOptions& options, Metrics& metrics)
    : options_(options),
      running_gauge_(metrics.Gauge(metric::kNumRequestsRunning, "Requests dispatched and not finished.")),
      waiting_gauge_(metrics.Gauge(metric::kNumRequestsWaiting, "Requests that wait for room.")),
      depth_gauge_(metrics.Gauge(metric::kRouterQueueDepth, "Requests in the router's admission queue.")),
      rejections_(metrics.Counter(metric::kAdmissionRejectionTotal, "Requests refused because the queue was full.")),
      queue_(options.order) {}

absl::Status Admission::Enter(QueuedRequest request) {
  std::function<void()> start;
  std::optional<QueuedRequest> displaced;
  absl::Status full;
  {
    std::lock_guard lock(mutex_);
    if (closed_) return Errorf(absl::StatusCode::kUnavailable, "the router is shutting down");
    const bool waits = blocked_ || !queue_.empty() || running_.size() >= options_.max_running;
    if (waits) {
      if (queue_.size() >= options_.max_queue) {
        full = FullLocked();
        displaced = queue_.Displace(request.tenant);
        if (!displaced.has_value()) return full;
      }
      queue_.Push(std::move(request), options_.now());
      start = NextLocked();
    } else {
      running_[request.id] = options_.now();
      start = std::move(request.start);
    }
    UpdateGaugesLocked();
  }
  if (displaced.has_value() && displaced->refuse) displaced->refuse(full);
  if (start) start();
  return absl::OkStatus();
}

absl::Status Admission::WaitForRoom(QueuedRequest request) {
  std::lock_guard lock(mutex_);
  if (probing_ == request.id) probing_.reset();
  if (queue_.size() >= options_.max_queue) return FullLocked();
  blocked_ = true;
  running_.erase(request.id);
  queue_.PushFront(std::move(request));
  UpdateGaugesLocked();
  return absl::OkStatus();
}

void Admission::Reserved(uint64_t id) {
  std::function<void()> next;
  {
    std::lock_guard lock(mutex_);
    if (probing_ != id) return;
    probing_.reset();
    next = NextLocked();
    UpdateGaugesLocked();
  }
  if (next) next();
}

void Admission::Leave(uint64_t id) {
  std::function<void()> next;
  {
    std::lock_guard lock(mutex_);
    if (probing_ == id) probing_.reset();
    const auto it = running_.find(id);
    if (it != running_.end()) {
      const double seconds = std::chrono::duration<double>(options_.now() - it->second).count();
      mean_seconds_ = 0.9 * mean_seconds_ + 0.1 * seconds;
      running_.erase(it);
      blocked_ = false;
    } else {
      queue_.Remove(id);
    }
    next = NextLocked();
    UpdateGaugesLocked();
  }
  if (next) next();
}

void Admission::OnRoom() {
  std::function<void()> next;
  {
    std::lock_guard lock(mutex_);
    blocked_ = false;
    next = NextLocked();
    UpdateGaugesLocked();
  }
  if (next) next();
}

void Admission::Close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
}

bool Admission::closed() const {
  std::lock_guard lock(mutex_);
  return closed_;
}

std::function<void()> Admission::NextLocked() {
  if (blocked_ || probing_.has_value() || queue_.empty() || running_.size() >= options_.max_running) return nullptr;
  QueuedRequest next = *queue_.Pop();
  probing_ = next.id;
  running_[next.id] = options_.now();
  return std::move(next.start);
}

// A place frees up every mean_seconds / running; a new request stands behind the whole queue.
absl::Status Admission::FullLocked() const {
  rejections_.Increment();
  const double running = static_cast<double>(std::max<size_t>(running_.size(), 1));
  const double wait_s = mean_seconds_ * static_cast<double>(queue_.size() + 1) / running;
  const uint32_t retry_s = static_cast<uint32_t>(std::clamp(std::ceil(wait_s), 1.0, 60.0));
  return SetRetryAfterMs(
      Errorf(absl::StatusCode::kResourceExhausted,
             "the cluster is full: {} requests run and {} of {} places in the queue are taken; try again in {} s",
             running_.size(), queue_.size(), options_.max_queue, retry_s),
      retry_s * 1000);
}

void Admission::UpdateGaugesLocked() {
  running_gauge_.Set(static_cast<double>(running_.size()));
  waiting_gauge_.Set(static_cast<double>(queue_.size()));
  depth_gauge_.Set(static_cast<double>(queue_.size()));
}

size_t Admission::num_running() const {
  std::lock_guard lock(mutex_);
  return running_.size();
}

size_t Admission::num_waiting() const {
  std::lock_guard lock(mutex_);
  return queue_.size();
}

}  // namespace spl::router
