// Sizes on the command line and in logs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace spl {

// "1048576", "512MiB", "1.5GiB", "64KiB", "2TiB", and the decimal KB, MB, GB, TB; a space before the unit is allowed.
// InvalidArgument: anything else, a negative number, or more than 2^63-1 bytes.
absl::StatusOr<uint64_t> ParseByteSize(std::string_view text);

// "512.0 MiB", for people.
std::string FormatByteSize(uint64_t bytes);

}  // namespace spl
