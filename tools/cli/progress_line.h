// Says on standard error how far a long work is.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace spl::cli {

// A work of two seconds shows nothing. From then on: on a terminal a bar that is drawn again, at most ten times a
// second, and gone in the end; elsewhere a line every ten seconds. One thread.
class ProgressLine {
 public:
  // Seconds since any moment.
  using Clock = std::function<double()>;

  // On standard error, with the width of its window.
  ProgressLine();
  // `out` is borrowed; lines have at most `width` columns.
  ProgressLine(std::FILE* out, bool terminal, size_t width, Clock clock);
  ~ProgressLine() { Finish(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // `text` says in words what `done` of `total` are, in ASCII: "3 of 8 samples". total 0: it is not known, and there is
  // no bar. The time that remains is what the part that is done took for itself, in proportion.
  void Update(uint64_t done, uint64_t total, const std::string& text);
  // Takes the bar away. Later updates begin anew.
  void Finish();

 private:
  std::string LineOf(uint64_t done, uint64_t total, const std::string& text, double elapsed_s) const;

  std::FILE* const out_;
  const bool terminal_;
  const size_t width_;
  const Clock clock_;
  double start_s_, last_s_;
  bool drawn_ = false;
};

// Shows what a work is at that cannot say how far it is: the text of its current stage, with the time since it began. A
// thread of its own draws.
class StageLine {
 public:
  StageLine();
  ~StageLine();  // takes the line away
  StageLine(const StageLine&) = delete;
  StageLine& operator=(const StageLine&) = delete;

  // Any thread: "loading the weights".
  void Begin(const std::string& stage);

 private:
  void Run();

  ProgressLine line_;  // the thread's own
  std::mutex mutex_;   // guards what follows
  std::condition_variable changed_;
  std::string stage_;
  std::chrono::steady_clock::time_point since_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace spl::cli
