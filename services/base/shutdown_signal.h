// Lets a main wait for the end of the program.
#pragma once

#include <chrono>
#include <csignal>

namespace spl {

// Turns SIGTERM and SIGINT into a wait. Construct it first in main, before any thread exists: it blocks the two signals
// in the calling thread, and threads inherit that. One thread may call Wait; any thread may call RequestStop (a signal
// handler may not). The destructor restores the signal mask.
class ShutdownSignal {
 public:
  // kNone: for programs hosted inside another program, and for tests; only RequestStop ends the wait.
  enum class Signals { kTermAndInt, kNone };

  explicit ShutdownSignal(Signals signals = Signals::kTermAndInt);
  ~ShutdownSignal();
  ShutdownSignal(const ShutdownSignal&) = delete;
  ShutdownSignal& operator=(const ShutdownSignal&) = delete;

  // Blocks until a signal or RequestStop. Returns the number of the signal, or 0 for RequestStop. Once it has returned,
  // a (second) SIGINT ends the process at once, for a person who does not want to wait for the drain. A second SIGTERM
  // changes nothing.
  int Wait();
  // The same with a time limit; returns -1 when it passes.
  int WaitFor(std::chrono::milliseconds timeout);

  void RequestStop();

 private:
  int signal_fd_ = -1;
  int stop_fd_ = -1;
  sigset_t old_mask_;
};

}  // namespace spl
