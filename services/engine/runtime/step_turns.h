// Engines that share a device take turns, step by step.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>

namespace spl::engine {

// One has the turn at a time; who asked first gets it next. So a decode step waits for one slice of a prompt at most,
// and a slice for one step, and the cores (or the GPU and its collectives) never work for both at once. Thread-safe;
// outlives its turns. Nobody waits for anything else while it has the turn.
class StepTurns {
 public:
  class Turn {
   public:
    Turn() = default;  // nobody's
    Turn(Turn&& other) noexcept : turns_(std::exchange(other.turns_, nullptr)) {}
    Turn& operator=(Turn&& other) noexcept {
      End();
      turns_ = std::exchange(other.turns_, nullptr);
      return *this;
    }
    ~Turn() { End(); }
    void End();

   private:
    friend class StepTurns;
    explicit Turn(StepTurns& turns) : turns_(&turns) {}
    StepTurns* turns_ = nullptr;
  };

  Turn Take();  // blocks for at most the steps of those who asked before
  // `turns` may be null: the device is the caller's alone.
  static Turn TakeOf(StepTurns* turns) { return turns == nullptr ? Turn() : turns->Take(); }
  uint64_t num_waiting() const;  // for a turn, now

 private:
  mutable std::mutex mutex_;  // guards the two below
  std::condition_variable ended_;
  uint64_t next_ = 0;     // number of who asks next
  uint64_t serving_ = 0;  // number of who has the turn, or gets it
};

}  // namespace spl::engine
