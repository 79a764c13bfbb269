// Shows how far a pull is: bars on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <cstdio>
#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "services/hub/pull.h"

namespace spl::cli {

// "2 s", "3 min 20 s", "1 h 5 min".
std::string FormatSeconds(double seconds);

// "[####....]" of `columns` columns between the brackets.
std::string ProgressBar(uint64_t done, uint64_t size, size_t columns);

// A bar for each file that is being fetched, at most `max_files` of them, and one for all. `bytes_per_s` 0: no rate and
// no remaining time. Lines are at most `width` columns.
std::vector<std::string> PullBars(const hub::PullProgress& progress, double bytes_per_s, size_t width,
                                  size_t max_files);

// One thread.
class PullDisplay {
 public:
  // Writes to `out`. Terminal: bars that are drawn again. Otherwise a line for each finished file, and one for all of
  // them every 10 s.
  PullDisplay(std::FILE* out, bool terminal, size_t width) : out_(out), terminal_(terminal), width_(width) {}
  void Update(const hub::PullProgress& progress);

 private:
  double Rate(const hub::PullProgress& progress);
  void Print(const std::string& line);

  std::FILE* const out_;
  const bool terminal_;
  const size_t width_;
  size_t num_bars_ = 0;  // lines that the next update draws over
  std::set<std::string> finished_;
  bool said_waiting_ = false;
  double last_line_s_ = 0;
  std::deque<std::pair<double, uint64_t>> samples_;  // seconds, bytes: of the last 5 s
};

// A display on stderr.
PullDisplay MakePullDisplay();

}  // namespace spl::cli
