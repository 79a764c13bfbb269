#include "services/hub/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "services/base/status.h"

namespace spl::hub {

absl::StatusOr<std::unique_ptr<FolderLock>> FolderLock::Take(const std::string& path, std::chrono::seconds timeout,
                                                             const std::function<bool()>& wait) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return Errorf(absl::StatusCode::kFailedPrecondition, "{}: {}", path, std::strerror(errno));
  std::unique_ptr<FolderLock> lock(new FolderLock(fd));
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR)
      return Errorf(absl::StatusCode::kFailedPrecondition, "{}: cannot be locked: {}", path, std::strerror(errno));
    if (std::chrono::steady_clock::now() >= deadline)
      return Errorf(absl::StatusCode::kDeadlineExceeded, "{}: another pull has held it for {} s", path,
                    timeout.count());
    if (!wait()) return absl::CancelledError("stopped");
  }
  return lock;
}

FolderLock::~FolderLock() { ::close(fd_); }

}  // namespace spl::hub
