// Copies to and from memory of a peer on the same host, which is mapped here: one memcpy per operation, on a thread of
// its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "services/transport/rma_ops.h"

namespace spl::transport {

struct CopyJob {
  std::byte* remote = nullptr;  // address at which remote_offset 0 is mapped
  bool is_get = false;          // true: copies from there; false: to it
  std::vector<RmaOp> ops;       // empty: a marker that only keeps its place in the order
  Copier copier;                // for writes; null: memcpy
  LeaseEnd lease_end = kNoLease;
  std::function<absl::Status()> late;  // called when a piece would start after lease_end; the job ends with its status
  // Called just before each piece of at most 1 MiB; any status but OK ends the job with that status.
  std::function<absl::Status()> interrupted;
  std::function<void(absl::Status)> done;  // on the engine's thread
};

// Runs jobs in the order of Push. Push returns false when 4096 jobs wait. Stop() first runs all accepted jobs.
class CopyEngine {
 public:
  CopyEngine();
  ~CopyEngine();

  [[nodiscard]] bool Push(CopyJob job);
  void Stop();

 private:
  void Loop();

  std::mutex mutex_;  // guards jobs_, stopping_
  std::condition_variable changed_;
  std::deque<CopyJob> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace spl::transport
