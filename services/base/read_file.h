// Reads whole files.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace spl {

// NotFound: there is no such file. InvalidArgument: it cannot be opened or read. Both name the path and the reason.
absl::StatusOr<std::string> ReadFile(const std::string& path);

}  // namespace spl
