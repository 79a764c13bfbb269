// Ctrl-C as something to wait for beside other input, for commands that a person talks to.
#pragma once

#include <csignal>

namespace spl::cli {

// Notes SIGINT while it lives. One at a time in a process; any thread may ask.
class InterruptEvent {
 public:
  InterruptEvent();
  ~InterruptEvent();  // SIGINT does again what it did before
  InterruptEvent(const InterruptEvent&) = delete;
  InterruptEvent& operator=(const InterruptEvent&) = delete;

  // Readable for poll while a signal is noted.
  int fd() const { return fd_; }
  // True if a signal was noted; it is no longer.
  bool Take();

 private:
  const int fd_;
  struct sigaction old_ {};
};

}  // namespace spl::cli
