#include "tools/cli/interrupt_event.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace spl::cli {
namespace {

std::atomic<int> noted_fd{-1};
static_assert(std::atomic<int>::is_always_lock_free);  // read by a signal handler

void OnSignal(int) {
  const int saved = errno;
  const uint64_t one = 1;
  if (const int fd = noted_fd.load(); fd >= 0) [[maybe_unused]]
    const ssize_t written = ::write(fd, &one, sizeof one);
  errno = saved;
}

}  // namespace

InterruptEvent::InterruptEvent() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  noted_fd = fd_;
  struct sigaction action {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_RESTART;  // those who wait poll fd()
  ::sigaction(SIGINT, &action, &old_);
}

InterruptEvent::~InterruptEvent() {
  ::sigaction(SIGINT, &old_, nullptr);
  noted_fd = -1;
  ::close(fd_);
}

bool InterruptEvent::Take() {
  uint64_t count = 0;
  return ::read(fd_, &count, sizeof count) == sizeof count;
}

}  // namespace spl::cli
