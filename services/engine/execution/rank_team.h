// Threads of a tensor-parallel group, one for each rank, which run the same task at the same time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"

namespace spl::engine {

// Owns the threads. One caller at a time.
class RankTeam {
 public:
  // `on_failure` must make ranks return that wait for a failed one. It runs once, on the caller's thread, when a rank
  // fails while others may still wait for it.
  RankTeam(int num_ranks, std::function<void(const absl::Status&)> on_failure);
  ~RankTeam();
  RankTeam(const RankTeam&) = delete;
  RankTeam& operator=(const RankTeam&) = delete;

  // Runs task(rank) on every thread and returns when all have returned. DataLoss, with the first error: the ranks'
  // common results are lost, and every later Run returns the same without running anything. A rank that does not return
  // within kRankTimeout counts as failed. If it then ignores `on_failure`, too, the process ends.
  absl::Status Run(const std::function<absl::Status(int rank)>& task);

 private:
  void Loop(int rank);

  const int num_ranks_;
  const std::function<void(const absl::Status&)> on_failure_;
  std::mutex mutex_;  // guards all below
  std::condition_variable start_, done_;
  uint64_t generation_ = 0;
  const std::function<absl::Status(int)>* task_ = nullptr;
  int num_running_ = 0;
  bool stopping_ = false;
  absl::Status failure_;  // the first rank's that failed
  absl::Status broken_;
  std::vector<std::thread> threads_;
};

inline constexpr std::chrono::seconds kRankTimeout{600};

}  // namespace spl::engine
