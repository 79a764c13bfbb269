#include "kernels/common/host_memory.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"

namespace spl::kernels {
namespace {

std::optional<uint64_t> ParseNumber(std::string_view text) {
  const size_t begin = text.find_first_of("0123456789");
  if (begin == std::string_view::npos) return std::nullopt;
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data() + begin, text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  return value;
}

// The number behind `name` in a file of lines "name value".
std::optional<uint64_t> ReadField(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name)) return ParseNumber(std::string_view(line).substr(name.size()));
  }
  return std::nullopt;
}

// The number that a file holds; nullopt for "max" and for a file that is not there.
std::optional<uint64_t> ReadNumber(const std::string& path) { return ReadField(path, ""); }

// Names of one version's files.
struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* inactive;  // line of memory.stat; of version 1 the one that counts groups below, too
};
constexpr CgroupFiles kVersion1{"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file "};
constexpr CgroupFiles kVersion2{"/memory.max", "/memory.current", "inactive_file "};

void ApplyLimit(const std::string& folder, const CgroupFiles& files, HostMemory& memory) {
  const std::optional<uint64_t> limit = ReadNumber(folder + files.limit);
  const std::optional<uint64_t> usage = ReadNumber(folder + files.usage);
  if (!limit.has_value() || !usage.has_value() || *limit >= memory.total_bytes) return;
  const uint64_t reclaimable = ReadField(folder + "/memory.stat", files.inactive).value_or(0);
  const uint64_t used = *usage - std::min(*usage, reclaimable);
  memory.total_bytes = *limit;
  if (const uint64_t left = *limit - std::min(*limit, used); left < memory.available_bytes) {
    memory.available_bytes = left;
    memory.limited_by = folder;
  }
}

// The folder of this process's group, and those above it up to the mount. In a container the kernel may name a path
// that only exists outside; the mount then is the container's own group.
void ApplyLimits(const std::string& mount, std::string path, const CgroupFiles& files, HostMemory& memory) {
  while (!path.empty() && path != "/") {
    ApplyLimit(mount + path, files, memory);
    path.resize(path.find_last_of('/'));
  }
  ApplyLimit(mount, files, memory);
}

}  // namespace

absl::StatusOr<HostMemory> ReadHostMemory(const std::string& root) {
  const std::string meminfo = root + "/proc/meminfo";
  const std::optional<uint64_t> total = ReadField(meminfo, "MemTotal:");
  const std::optional<uint64_t> available = ReadField(meminfo, "MemAvailable:");
  if (!total.has_value() || !available.has_value())
    return absl::NotFoundError(absl::StrCat(meminfo, ": no MemTotal or no MemAvailable"));
  HostMemory memory{.available_bytes = *available << 10, .total_bytes = *total << 10, .limited_by = {}};
  std::ifstream groups(root + "/proc/self/cgroup");  // "4:memory:/a/b" of version 1, "0::/a/b" of version 2
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers.find(",memory,") != std::string::npos)
      ApplyLimits(root + "/sys/fs/cgroup/memory", path, kVersion1, memory);
    else if (controllers == ",,")
      ApplyLimits(root + "/sys/fs/cgroup", path, kVersion2, memory);
  }
  return memory;
}

}  // namespace spl::kernels
