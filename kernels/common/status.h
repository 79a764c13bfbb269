// Errors of kernel calls, built from anything that absl::StrCat takes.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace spl::kernels {

template <typename... Parts>
absl::Status InvalidCall(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

}  // namespace spl::kernels
