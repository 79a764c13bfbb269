// Range checks for numbers from outside; the message names the field.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "services/base/status.h"

namespace spl {

// InvalidArgument, with the field, its value and its range, unless low <= value <= high.
inline absl::Status CheckRange(std::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return InvalidArgument("{} is {}, it must be {} to {}", field, value, low, high);
}
// The same for a share: 0 to 1.
inline absl::Status CheckShare(std::string_view field, double value) {
  if (value >= 0 && value <= 1) return absl::OkStatus();
  return InvalidArgument("{} is {}, it must be 0 to 1", field, value);
}

}  // namespace spl
