// Defines "equal within tolerance" for kernels (tier T1): a variant against the double-precision reference on the same
// inputs. Tests use it; no test may widen it for one case.
#pragma once

#include "kernels/common/dtype.h"

namespace spl::kernels {

struct Tolerance {
  double relative_l2;         // ||x - ref||_2 / ||ref||_2
  double max_abs_of_max_ref;  // max |x - ref| / max |ref|
};

// Chosen by the narrowest type that the variant itself rounds to. Attention over bf16 pages takes bf16 inputs exactly
// and computes in f32, so it is held to kF32; a bf16 GEMM rounds its activations and is held to kBF16.
constexpr Tolerance ToleranceFor(DType dtype) {
  return dtype == DType::kF32 ? Tolerance{1e-5, 5e-5} : Tolerance{4e-3, 1e-2};
}

}  // namespace spl::kernels
