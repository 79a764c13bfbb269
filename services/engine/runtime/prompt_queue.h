// The prompts of a prefill engine in the order of their turns: those that wait for pages, and those that run.
#pragma once

#include <chrono>
#include <list>
#include <memory>
#include <span>
#include <vector>

#include "services/engine/runtime/prefill_job.h"

namespace spl::engine {

// Order: prompts that are overdue (2 s behind Submit, at low priority 10 s) go first, the oldest of them in front. Then
// come requests, the one with the fewest tokens left in front, then low priority likewise. Equals go as they came.
// One thread.
class PromptQueue {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Job = std::shared_ptr<PrefillJob>;

  static bool IsOverdue(const PrefillJob& job, Time now);

  void Wait(std::span<const Job> jobs) { waiting_.insert(waiting_.end(), jobs.begin(), jobs.end()); }
  void Run(Job job) { running_.push_back(std::move(job)); }
  void Remove(const Job& job);

  Job NextWaiting(Time now) const;  // null: none waits
  std::vector<Job> RunningInOrder(Time now) const;
  std::vector<Job> TakeDead(Time now);  // what was cancelled or is past its deadline
  std::vector<Job> TakeAll();

  bool has_waiting() const { return !waiting_.empty(); }
  size_t num_running() const { return running_.size(); }

 private:
  std::list<Job> waiting_, running_;
};

}  // namespace spl::engine
