#include "services/engine/runtime/device_lost.h"

#include <unistd.h>

#include <cstdio>

#include "services/base/status.h"

namespace spl::engine {

void EndProcessOnDeviceLost(const absl::Status& status) {
  fmt::print(stderr, "the device is lost, this worker ends: {}\n", MessageOf(status));
  std::fflush(stderr);
  // Not exit(): destructors would call into a dead context and may hang.
  ::_exit(1);
}

}  // namespace spl::engine
