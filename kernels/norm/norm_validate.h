#pragma once

#include "kernels/norm/norm.h"

namespace spl::kernels {

absl::Status ValidateRmsNorm(const RmsNormArgs& args);

}  // namespace spl::kernels
