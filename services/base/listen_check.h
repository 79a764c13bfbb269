// Finds out before a program's long start whether its listeners will have their addresses.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace spl {

// Listens at `address` for a moment. InvalidArgument: it is no HOST:PORT. Unavailable: another program listens there,
// the host is no address of this machine, or the port needs more rights; the message begins with `flag` and says what
// to do. OK is no promise: somebody may take the port before the listener does.
absl::Status CheckCanListen(const std::string& flag, const std::string& address);

}  // namespace spl
