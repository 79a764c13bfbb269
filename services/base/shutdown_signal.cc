#include "services/base/shutdown_signal.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>

namespace spl {
namespace {

int OrAbort(int fd) {  // out of descriptors at start: nothing can be served
  if (fd < 0) std::abort();
  return fd;
}

}  // namespace

ShutdownSignal::ShutdownSignal(Signals signals) {
  sigset_t handled;
  sigemptyset(&handled);
  if (signals == Signals::kTermAndInt) {
    sigaddset(&handled, SIGTERM);
    sigaddset(&handled, SIGINT);
  }
  pthread_sigmask(SIG_BLOCK, &handled, &old_mask_);
  signal_fd_ = OrAbort(signalfd(-1, &handled, SFD_CLOEXEC | SFD_NONBLOCK));
  stop_fd_ = OrAbort(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
}

ShutdownSignal::~ShutdownSignal() {
  // A signal that came again while the program drained would end it when the mask goes back: it has been obeyed.
  signalfd_siginfo info;
  while (read(signal_fd_, &info, sizeof(info)) == sizeof(info)) {
  }
  close(signal_fd_);
  close(stop_fd_);
  pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
}

int ShutdownSignal::Wait() { return WaitFor(std::chrono::milliseconds(-1)); }

int ShutdownSignal::WaitFor(std::chrono::milliseconds timeout) {
  pollfd fds[2] = {{signal_fd_, POLLIN, 0}, {stop_fd_, POLLIN, 0}};
  int ready;
  do {
    ready = poll(fds, 2, static_cast<int>(timeout.count()));
  } while (ready < 0 && errno == EINTR);
  if (ready == 0) return -1;
  int signal_number = 0;
  signalfd_siginfo info;
  if ((fds[0].revents & POLLIN) != 0 && read(signal_fd_, &info, sizeof(info)) == sizeof(info)) {
    signal_number = static_cast<int>(info.ssi_signo);
    sigset_t interrupt;
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    pthread_sigmask(SIG_UNBLOCK, &interrupt, nullptr);
  }
  return signal_number;
}

void ShutdownSignal::RequestStop() {
  const uint64_t one = 1;
  // The counter can only be full when a stop was requested 2^64 times: the result does not matter.
  [[maybe_unused]] const ssize_t written = write(stop_fd_, &one, sizeof(one));
}

}  // namespace spl
