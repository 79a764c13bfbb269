#pragma once

#include "kernels/embedding/embedding.h"

namespace spl::kernels {

absl::Status ValidateGatherRows(const GatherRowsArgs& args);

}  // namespace spl::kernels
