// One UCX context and worker, and the one thread that may touch them.
#pragma once

#include <ucp/api/ucp.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace spl::transport {

// Owns context, worker and progress thread. The thread sleeps in epoll on UCX's event descriptor when nothing moves: on
// a loaded machine busy polling costs milliseconds per round trip, not microseconds. Any thread may call Post. Calls
// that take a ucp handle are made only from a posted task or a UCX callback.
class UcxWorker {
 public:
  // carriers as in TransportOptions.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Create(const std::string& carriers);
  ~UcxWorker();

  // Runs `task` soon on the progress thread, in order. False: the bounded queue is full, or the thread has ended.
  [[nodiscard]] bool Post(std::function<void()> task);
  // The same without the bound, for work that follows from accepted work: completions, closes. False: after Stop.
  bool PostAlways(std::function<void()> task);
  // Runs `task` there and waits for it. Unavailable: after Stop. Must not be called on the progress thread.
  absl::Status Run(const std::function<void()>& task);

  // Runs all posted tasks, ends the thread, destroys the worker. Idempotent.
  void Stop();

  ucp_context_h context() const { return context_; }
  ucp_worker_h worker() const { return worker_; }

 private:
  UcxWorker() = default;
  absl::Status Init(const std::string& carriers);
  void Loop();
  bool Push(std::function<void()> task, size_t num_tasks_max);
  void RunTasks();
  bool Progress();
  void Sleep();
  void Wake();

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int epoll_fd_ = -1;
  int wake_fd_ = -1;
  std::mutex mutex_;  // guards the next two
  std::vector<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace spl::transport
