// How a main waits for its end.
#pragma once

#include <chrono>
#include <csignal>

namespace spl {

// Turns SIGTERM and SIGINT into a wait. Construct it first thing in main, before any thread exists: it blocks the two
// signals in the calling thread, and threads inherit that. Wait may be called from one thread; RequestStop from any
// thread (not from a signal handler). The destructor restores the signal mask.
class ShutdownSignal {
 public:
  // kNone: for programs hosted inside another one and for tests; only RequestStop ends the wait.
  enum class Signals { kTermAndInt, kNone };

  explicit ShutdownSignal(Signals signals = Signals::kTermAndInt);
  ~ShutdownSignal();
  ShutdownSignal(const ShutdownSignal&) = delete;
  ShutdownSignal& operator=(const ShutdownSignal&) = delete;

  // Blocks until a signal or RequestStop. Returns the signal's number, 0 for RequestStop. After it has returned, a
  // (second) SIGINT ends the process at once, for the person who does not want to wait for the drain; a second SIGTERM
  // changes nothing.
  int Wait();
  // The same with a time limit; -1 when it passes.
  int WaitFor(std::chrono::milliseconds timeout);

  void RequestStop();

 private:
  int signal_fd_ = -1;
  int stop_fd_ = -1;
  sigset_t old_mask_;
};

}  // namespace spl
