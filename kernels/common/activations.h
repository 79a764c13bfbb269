// Pointers to activations, with their element type. The CPU variants compute in f32 and see plain float pointers; the
// CUDA variants also take bf16.
#pragma once

#include <cassert>
#include <cstdint>

#include "kernels/common/dtype.h"

namespace spl::kernels {

// Borrowed. Converts from float*, and back when it holds f32 (a caller's bug otherwise).
struct Activations {
  void* data = nullptr;
  DType dtype = DType::kF32;

  Activations() = default;
  Activations(float* p) : data(p) {}  // NOLINT(google-explicit-constructor): every CPU caller has float*
  Activations(void* p, DType t) : data(p), dtype(t) {}
  operator float*() const {  // NOLINT(google-explicit-constructor)
    assert(dtype == DType::kF32);
    return static_cast<float*>(data);
  }
};

struct ConstActivations {
  const void* data = nullptr;
  DType dtype = DType::kF32;

  ConstActivations() = default;
  ConstActivations(const float* p) : data(p) {}                             // NOLINT(google-explicit-constructor)
  ConstActivations(const Activations& a) : data(a.data), dtype(a.dtype) {}  // NOLINT(google-explicit-constructor)
  ConstActivations(const void* p, DType t) : data(p), dtype(t) {}
  operator const float*() const {  // NOLINT(google-explicit-constructor)
    assert(dtype == DType::kF32);
    return static_cast<const float*>(data);
  }
};

}  // namespace spl::kernels
