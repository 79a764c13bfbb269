// Says on standard error how far a long work is.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
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

// Shows the current stage of a work: its text with the time since it began, or with a bar as soon as it says how far it
// is. A thread of its own draws.
class StageLine {
 public:
  StageLine();
  // `line` is for the thread alone.
  explicit StageLine(std::unique_ptr<ProgressLine> line);
  ~StageLine();  // takes the line away
  StageLine(const StageLine&) = delete;
  StageLine& operator=(const StageLine&) = delete;

  // Any thread: "loading the weights".
  void Begin(const std::string& stage);
  // Any thread: bytes of the current stage.
  void Update(uint64_t done_bytes, uint64_t total_bytes);

 private:
  void Run();

  const std::unique_ptr<ProgressLine> line_;  // the thread's own
  std::mutex mutex_;                          // guards what follows
  std::condition_variable changed_;
  std::string stage_;
  std::chrono::steady_clock::time_point since_;
  uint64_t done_bytes_ = 0, total_bytes_ = 0;  // total 0: not known
  bool ended_ = false;
  std::thread thread_;
};

// "loading the weights: 43 %, 6.5 GiB of 15.0 GiB". total 0: the stage with `seconds`.
std::string StageText(const std::string& stage, uint64_t done_bytes, uint64_t total_bytes, double seconds);

}  // namespace spl::cli
