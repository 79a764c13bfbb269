// Bounds of one call into xgrammar, which itself can be neither timed nor stopped: processor time, memory and stack.
#pragma once

#include <chrono>
#include <cstddef>
#include <exception>

namespace spl::grammar {

struct WorkLimits {
  std::chrono::nanoseconds time;  // processor time of the thread
  size_t bytes = 0;               // allocated and not freed again
};

// Thrown out of the call that goes beyond a limit. Its objects may only be destroyed afterwards.
class WorkExceeded final : public std::exception {
 public:
  explicit WorkExceeded(const char* what) : what_(what) {}
  const char* what() const noexcept override { return what_; }

 private:
  const char* what_;  // "time", "memory" or "nesting"
};

// Holds the calling thread to the limits while it lives; one at a time in a thread.
//
// The check is where the work passes by: libsplice_xgrammar.so is linked so that xgrammar's allocations and its
// parser's step from byte to byte come here first (CMakeLists.txt). Cost: some ns for each of them.
class WorkBudget {
 public:
  explicit WorkBudget(const WorkLimits& limits);
  ~WorkBudget();
  WorkBudget(const WorkBudget&) = delete;
  WorkBudget& operator=(const WorkBudget&) = delete;

  // Time so far: the wall clock's where that is at most `exact_above`, else the processor's, which costs 0.3 us to
  // read.
  std::chrono::nanoseconds Spent(std::chrono::nanoseconds exact_above) const;
  // Leaves what follows unchecked: for code that must not throw.
  void End();

  // For the checks: REQUIRES the calling thread's budget.
  void Step();
  void Allocated(size_t bytes);
  void Freed(size_t bytes) { bytes_ -= static_cast<std::ptrdiff_t>(bytes); }

 private:
  const WorkLimits limits_;
  const std::chrono::steady_clock::time_point start_;
  const std::chrono::nanoseconds start_on_processor_;
  const char* const stack_;  // where the stack was when the work began
  std::ptrdiff_t bytes_ = 0;
  unsigned steps_ = 0;
};

}  // namespace spl::grammar
