#include "services/base/read_file.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "services/base/status.h"

namespace spl {

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    const int error = errno;
    const auto code = error == ENOENT ? absl::StatusCode::kNotFound : absl::StatusCode::kInvalidArgument;
    return Errorf(code, "cannot open {}: {}", path, std::strerror(error));
  }
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) return Errorf(absl::StatusCode::kInvalidArgument, "cannot read {}", path);
  return text;
}

}  // namespace spl
