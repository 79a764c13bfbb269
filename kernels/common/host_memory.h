// Memory of the machine that this process may still use.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace spl::kernels {

struct HostMemory {
  uint64_t available_bytes =
      0;  // bytes that can be allocated without swapping, page cache that can be dropped included
  uint64_t total_bytes = 0;
  std::string limited_by;  // folder of the cgroup whose limit leaves least; empty: the machine itself does
};

// Takes MemAvailable and MemTotal of /proc/meminfo, or the memory limit of this process's cgroup or of one above it
// (version 1 or 2) where that leaves less. Inactive file pages of a cgroup count as available, as the kernel counts
// them in MemAvailable. `root` is put in front of the paths, for tests. NotFound: there is no /proc/meminfo, or it
// lacks one of the two lines. A cgroup that cannot be read sets no limit. Cost: a few small files; any thread.
absl::StatusOr<HostMemory> ReadHostMemory(const std::string& root = "");

}  // namespace spl::kernels
