// Orders the prompts of a prefill engine: the waiting ones, which need pages, and the running ones.
#pragma once

#include <chrono>
#include <list>
#include <memory>
#include <span>
#include <vector>

#include "services/engine/runtime/prefill_job.h"

namespace spl::engine {

// Order: first overdue prompts (2 s after Submit, at low priority 10 s), the oldest of them first. Then requests, the
// one with the fewest remaining tokens first. Then low priority in the same way. Last of all, those whose start is
// still arriving from the store in time. Equals keep their order of arrival. One thread.
class PromptQueue {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Job = std::shared_ptr<PrefillJob>;

  static bool IsOverdue(const PrefillJob& job, Time now);

  void Wait(std::span<const Job> jobs) { waiting_.insert(waiting_.end(), jobs.begin(), jobs.end()); }
  void Run(Job job) { running_.push_back(std::move(job)); }
  void Remove(const Job& job);

  Job NextWaiting(Time now) const;  // null: none is waiting
  std::vector<Job> RunningInOrder(Time now) const;
  std::vector<Job> TakeDead(Time now);  // those that were cancelled or are past their deadline
  std::vector<Job> TakeAll();

  bool has_waiting() const { return !waiting_.empty(); }
  size_t num_running() const { return running_.size(); }

 private:
  std::list<Job> waiting_, running_;
};

}  // namespace spl::engine
