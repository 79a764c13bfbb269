#include "services/base/listen_check.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "services/base/address.h"
#include "services/base/status.h"

namespace spl {
namespace {

// 0, or the errno of the call that failed.
int TryToListen(const addrinfo& at) {
  const int fd = ::socket(at.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return errno;
  // As the listeners do: connections of an earlier program that linger are not in the way.
  const int on = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  const int error = ::bind(fd, at.ai_addr, at.ai_addrlen) != 0 || ::listen(fd, 1) != 0 ? errno : 0;
  ::close(fd);
  return error;
}

std::string Advice(int error) {
  switch (error) {
    case EADDRINUSE:
      return "another program listens there; choose another port (0: any free one)";
    case EADDRNOTAVAIL:
      return "this machine has no such address";
    case EACCES:
      return "a port below 1024 needs more rights; choose another port";
    default:
      return std::strerror(error);
  }
}

}  // namespace

absl::Status CheckCanListen(const std::string& flag, const std::string& address) {
  const auto parsed = ParseHostPort(address);
  if (!parsed.ok()) return Annotate(parsed.status(), flag);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(parsed->host.c_str(), std::to_string(parsed->port).c_str(), &hints, &found);
      error != 0)
    return Errorf(absl::StatusCode::kUnavailable, "{} {}: {}", flag, address, ::gai_strerror(error));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  // A name may have several addresses; a listener takes the first one.
  if (const int error = TryToListen(*found); error != 0)
    return Errorf(absl::StatusCode::kUnavailable, "{} {}: {}", flag, address, Advice(error));
  return absl::OkStatus();
}

}  // namespace spl
