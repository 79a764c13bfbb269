// One process at a time fills a folder.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace spl::hub {

// Held until it is destroyed, or the process has ended in whatever way. The file stays.
class FolderLock {
 public:
  // Takes the lock of `path`, a file that is made. While another process or thread has it, calls `wait` again and
  // again, which pauses and returns false to give up. DeadlineExceeded: not free within `timeout`. Cancelled: `wait`
  // gave up. FailedPrecondition: the file cannot be made.
  static absl::StatusOr<std::unique_ptr<FolderLock>> Take(const std::string& path, std::chrono::seconds timeout,
                                                          const std::function<bool()>& wait);
  ~FolderLock();

 private:
  explicit FolderLock(int fd) : fd_(fd) {}
  const int fd_;
};

}  // namespace spl::hub
