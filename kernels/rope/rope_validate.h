#pragma once

#include "kernels/rope/rope.h"

namespace spl::kernels {

absl::Status ValidateRopeWriteKv(const RopeWriteKvArgs& args);

}  // namespace spl::kernels
