// Division that rounds up.
#pragma once

#include <cstdint>

namespace spl::kernels {

// REQUIRES: a >= 0, b > 0.
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace spl::kernels
