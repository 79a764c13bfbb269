// A program at a terminal of its own, typed to by a test.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace spl::test {

// One thread. Failures are those of the running test and show everything that the program wrote.
class PtyProcess {
 public:
  // argv[0] is a path. `environment` is all of it, as NAME=VALUE. The window has `columns` x `rows`.
  PtyProcess(const std::vector<std::string>& argv, const std::vector<std::string>& environment, int columns = 100,
             int rows = 30);
  ~PtyProcess();  // SIGKILL unless it has ended
  PtyProcess(const PtyProcess&) = delete;
  PtyProcess& operator=(const PtyProcess&) = delete;

  void Type(const std::string& keys);
  // Waits until the program has written `text` behind what the last call found. False, and a failure: it did not within
  // 10 s, or it has ended.
  bool WaitFor(const std::string& text);
  // Everything that was written so far, as far as WaitFor and WaitForExit have read it.
  const std::string& output() const { return output_; }
  // The output that WaitFor has read behind its text.
  std::string rest() const { return output_.substr(found_); }
  // Exit code, or 128 + signal; -1, and a failure: it has not ended within 10 s.
  int WaitForExit();

 private:
  bool ReadSome(std::chrono::steady_clock::time_point deadline);

  int pid_ = -1;
  int terminal_ = -1;
  std::string output_;
  size_t found_ = 0;
};

}  // namespace spl::test
