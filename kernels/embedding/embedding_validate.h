#pragma once

#include "kernels/embedding/embedding.h"

namespace spl::kernels {

absl::Status ValidateGatherRows(const GatherRowsArgs& args);  // of a backend that works in host memory

}  // namespace spl::kernels
