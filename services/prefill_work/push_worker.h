// The thread that moves finished KV out of a prefill engine, so that the engine's own thread only enqueues.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "services/base/bounded_queue.h"
#include "services/base/metrics.h"
#include "services/engine/engine.h"

namespace spl::prefill {

struct PushMetrics {
  explicit PushMetrics(Metrics& metrics);
  prometheus::Counter& bytes_out;
  prometheus::Counter& failures_lost;
  prometheus::Counter& failures_lease;
  prometheus::Counter& failures_commit;
  prometheus::Histogram& seconds;
};

// Owns the push thread of a prefill worker. Any thread may enqueue.
class PushWorker {
 public:
  // `on_pages_back` runs when a push has released its pages.
  PushWorker(const engine::Model& model, Metrics& metrics, std::function<void()> on_pages_back);
  ~PushWorker();

  // False: the queue is full or closed.
  bool Enqueue(std::function<void()> task) { return tasks_.TryPush(std::move(task)); }
  // For work that is not due yet: runs, in order, when no task of Enqueue waits. False as above.
  bool EnqueueEarly(std::function<void()> task) {
    return early_tasks_.TryPush(std::move(task)) && tasks_.TryPush([] {});  // which wakes the thread
  }
  void WaitIdle(std::chrono::steady_clock::time_point deadline);
  void Stop();

  const engine::Model& model() const { return model_; }
  PushMetrics& metrics() { return metrics_; }
  void PushStarted();
  void PushEnded();

 private:
  void Loop();

  const engine::Model& model_;
  PushMetrics metrics_;
  const std::function<void()> on_pages_back_;
  BoundedQueue<std::function<void()>> tasks_, early_tasks_;
  std::mutex mutex_;  // guards num_active_
  std::condition_variable idle_;
  size_t num_active_ = 0;
  std::thread thread_;
};

}  // namespace spl::prefill
