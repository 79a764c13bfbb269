#pragma once

#include "kernels/embedding/embedding.h"

namespace spl::kernels {

// For backends that work in host memory, where ids that name a token of the batch before can be read.
absl::Status ValidateGatherRows(const GatherRowsArgs& args);

}  // namespace spl::kernels
