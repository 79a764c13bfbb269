#include "services/engine/runtime/prompt_queue.h"

#include <algorithm>

namespace spl::engine {
namespace {

// A prompt that waited this long runs before younger, shorter ones: bounds the delay that short prompts can cause.
constexpr std::chrono::seconds kMaxDelay{2};
constexpr std::chrono::seconds kMaxLowPriorityDelay{10};

auto ByTurn(PromptQueue::Time now) {
  return [now](const PromptQueue::Job& a, const PromptQueue::Job& b) {
    const bool overdue = PromptQueue::IsOverdue(*a, now);
    if (overdue != PromptQueue::IsOverdue(*b, now)) return overdue;
    if (overdue) return a->submitted < b->submitted;
    if (a->low_priority() != b->low_priority()) return b->low_priority();
    return a->remaining() < b->remaining();
  };
}

}  // namespace

bool PromptQueue::IsOverdue(const PrefillJob& job, Time now) {
  return now - job.submitted > (job.low_priority() ? kMaxLowPriorityDelay : kMaxDelay);
}

void PromptQueue::Remove(const Job& job) {
  waiting_.remove(job);
  running_.remove(job);
}

PromptQueue::Job PromptQueue::NextWaiting(Time now) const {
  return waiting_.empty() ? nullptr : *std::min_element(waiting_.begin(), waiting_.end(), ByTurn(now));
}

std::vector<PromptQueue::Job> PromptQueue::RunningInOrder(Time now) const {
  std::vector<Job> jobs(running_.begin(), running_.end());
  std::stable_sort(jobs.begin(), jobs.end(), ByTurn(now));
  // Text whose KV is expected to arrive is computed only if there is nothing else to do. Overdue prompts expect nothing.
  std::stable_partition(jobs.begin(), jobs.end(),
                        [&](const Job& job) { return IsOverdue(*job, now) || !job->ExpectsMore(now); });
  return jobs;
}

std::vector<PromptQueue::Job> PromptQueue::TakeDead(Time now) {
  std::vector<Job> dead;
  const auto take = [&](const Job& job) {
    if (!job->cancelled() && now < job->request.deadline) return false;
    dead.push_back(job);
    return true;
  };
  waiting_.remove_if(take);
  running_.remove_if(take);
  return dead;
}

std::vector<PromptQueue::Job> PromptQueue::TakeAll() {
  std::vector<Job> all(waiting_.begin(), waiting_.end());
  all.insert(all.end(), running_.begin(), running_.end());
  waiting_.clear();
  running_.clear();
  return all;
}

}  // namespace spl::engine
