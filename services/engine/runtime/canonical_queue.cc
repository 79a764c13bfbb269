#include "services/engine/runtime/canonical_queue.h"

#include <algorithm>

namespace spl::engine {

size_t CanonicalQueue::Add(CanonicalTask task) {
  const auto known = std::find_if(tasks_.begin(), tasks_.end(),
                                  [&](const CanonicalTask& other) { return other.keys.back() == task.keys.back(); });
  if (known != tasks_.end()) {
    known->frozen |= task.frozen;
    known->quantized |= task.quantized;
    known->replaces |= task.replaces;
    return 0;
  }
  const auto place = std::upper_bound(
      tasks_.begin(), tasks_.end(), task,
      [](const CanonicalTask& a, const CanonicalTask& b) { return a.tokens.size() > b.tokens.size(); });
  tasks_.insert(place, std::move(task));
  if (tasks_.size() <= capacity_) return 0;
  tasks_.erase(tasks_.begin());
  return 1;
}

std::optional<CanonicalTask> CanonicalQueue::Take() {
  if (tasks_.empty()) return std::nullopt;
  CanonicalTask task = std::move(tasks_.back());
  tasks_.pop_back();
  return task;
}

size_t CanonicalQueue::Clear() {
  const size_t count = tasks_.size();
  tasks_.clear();
  return count;
}

}  // namespace spl::engine
