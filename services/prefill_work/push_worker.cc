#include "services/prefill_work/push_worker.h"

#include "services/base/thread_priority.h"

namespace spl::prefill {
namespace {

// A prompt of 256 slices through 128 layers fits several times over.
constexpr size_t kMaxTasks = 1 << 18;
constexpr std::chrono::milliseconds kIdleWait{200};

}  // namespace

PushMetrics::PushMetrics(Metrics& metrics)
    : bytes_out(metrics.Counter(metric::kKvTransferBytesTotal, "KV bytes transferred.", {{"direction", "out"}})),
      failures_lost(metrics.Counter(metric::kKvTransferFailuresTotal, "Transfers that failed.", {{"reason", "lost"}})),
      failures_lease(
          metrics.Counter(metric::kKvTransferFailuresTotal, "Transfers that failed.", {{"reason", "lease"}})),
      failures_commit(
          metrics.Counter(metric::kKvTransferFailuresTotal, "Transfers that failed.", {{"reason", "commit"}})),
      seconds(metrics.Histogram(metric::kKvTransferSeconds,
                                "From the last computed layer to the decode worker's acknowledgement.",
                                buckets::Stage())) {}

PushWorker::PushWorker(const engine::Model& model, Metrics& metrics, std::function<void()> on_pages_back)
    : model_(model),
      metrics_(metrics),
      on_pages_back_(std::move(on_pages_back)),
      tasks_(kMaxTasks),
      early_tasks_(kMaxTasks),
      thread_([this] { Loop(); }) {}

PushWorker::~PushWorker() { Stop(); }

void PushWorker::Loop() {
  SetThreadPriority(ThreadPriority::kTransfer);
  while (true) {
    auto task = tasks_.TryPop();
    if (!task) task = early_tasks_.TryPop();
    if (!task) task = tasks_.Pop(kIdleWait);
    if (task)
      (*task)();
    else if (tasks_.closed())
      return;
  }
}

void PushWorker::PushStarted() {
  std::lock_guard lock(mutex_);
  ++num_active_;
}

void PushWorker::PushEnded() {
  on_pages_back_();
  std::lock_guard lock(mutex_);
  --num_active_;
  idle_.notify_all();
}

void PushWorker::WaitIdle(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  idle_.wait_until(lock, deadline, [&] { return num_active_ == 0; });
}

void PushWorker::Stop() {
  early_tasks_.Close();
  tasks_.Close();
  if (thread_.joinable()) thread_.join();
}

}  // namespace spl::prefill
