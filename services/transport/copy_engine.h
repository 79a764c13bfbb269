// Writes into memory of a peer on the same host, which is mapped here: one memcpy per write, on a thread of its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "services/transport/kv_transport.h"

namespace spl::transport {

struct CopyJob {
  std::byte* target = nullptr;  // where remote_offset 0 is mapped
  std::vector<PutOp> ops;       // empty: a marker that only keeps its place in the order
  Copier copier;                // null: memcpy
  // Asked between pieces of at most 1 MiB: anything but OK ends the job with that status.
  std::function<absl::Status()> interrupted;
  std::function<void(absl::Status)> done;  // on the engine's thread
};

// Jobs run in the order they were pushed. Bounded: Push is false when 4096 jobs wait. Stop() runs what was pushed.
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
