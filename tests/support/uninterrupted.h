// System calls beside signals, the fuzzer's timer and those of the leak detector for example.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>

namespace spl::testing {

// Calls again what a signal has interrupted.
template <typename Call>
auto Uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// An interrupted connect goes on by itself; the next call may say that it has ended.
inline bool Connected(int fd, const sockaddr_in& to) {
  return Uninterrupted([&] { return ::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to); }) == 0 ||
         errno == EISCONN;
}

}  // namespace spl::testing
