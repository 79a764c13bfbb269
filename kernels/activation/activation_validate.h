#pragma once

#include "kernels/activation/activation.h"

namespace spl::kernels {

absl::Status ValidateSiluMul(const SiluMulArgs& args);

}  // namespace spl::kernels
