// Ctrl-C for commands that end their work in order: the first signal asks for it, a second one ends the program.
#pragma once

#include <atomic>
#include <csignal>
#include <initializer_list>
#include <vector>

namespace spl::cli {

// Notes the given signals while it lives. timeout(1) sends each signal twice, to the program and to its group: one that
// comes within 0.3 s of the first is the same one. One at a time in a process; any thread may ask.
class Interrupt {
 public:
  explicit Interrupt(std::initializer_list<int> signals);
  ~Interrupt();  // the signals do again what they did before
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // True from the first signal on.
  static const std::atomic<bool>& noted();

 private:
  struct Old {
    int signal;
    struct sigaction action;
  };
  std::vector<Old> old_;
};

}  // namespace spl::cli
