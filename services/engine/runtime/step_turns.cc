#include "services/engine/runtime/step_turns.h"

namespace spl::engine {

StepTurns::Turn StepTurns::Take() {
  std::unique_lock lock(mutex_);
  const uint64_t number = next_++;
  ended_.wait(lock, [&] { return serving_ == number; });
  return Turn(*this);
}

uint64_t StepTurns::num_waiting() const {
  std::lock_guard lock(mutex_);
  return next_ > serving_ ? next_ - serving_ - 1 : 0;
}

void StepTurns::Turn::End() {
  StepTurns* const turns = std::exchange(turns_, nullptr);
  if (turns == nullptr) return;
  std::lock_guard lock(turns->mutex_);
  ++turns->serving_;
  turns->ended_.notify_all();
}

}  // namespace spl::engine
