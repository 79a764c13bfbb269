// Pointers to activations, with their element type. The CPU variants compute in f32 and see plain float pointers; the
// CUDA variants also take bf16. Some operations make or take rows in e4m3 (quantize/quantize_rows.h).
#pragma once

#include <cassert>
#include <cstdint>

#include "kernels/common/dtype.h"

namespace spl::kernels {

// Rows for which a tensor in e4m3 with scale groups, and the result of its product, have room: products of such rows
// are of four at a time.
constexpr int64_t E4M3Rows(int64_t num_rows) { return (num_rows + 3) / 4 * 4; }

// Borrowed. Converts from float*, and back when it holds f32 (a caller's bug otherwise).
struct Activations {
  void* data = nullptr;
  DType dtype = DType::kF32;
  // kE4M3: columns of a row that share a scale, 0: all. [num_rows] or [groups, E4M3Rows(num_rows)].
  float* scales = nullptr;
  int64_t scale_group = 0;

  Activations() = default;
  Activations(float* p) : data(p) {}  // NOLINT(google-explicit-constructor): every CPU caller has float*
  Activations(void* p, DType t, float* s = nullptr, int64_t group = 0)
      : data(p), dtype(t), scales(s), scale_group(group) {}
  operator float*() const {  // NOLINT(google-explicit-constructor)
    assert(dtype == DType::kF32);
    return static_cast<float*>(data);
  }
};

struct ConstActivations {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  const float* scales = nullptr;
  int64_t scale_group = 0;

  ConstActivations() = default;
  ConstActivations(const float* p) : data(p) {}  // NOLINT(google-explicit-constructor)
  ConstActivations(const Activations& a)         // NOLINT(google-explicit-constructor)
      : data(a.data), dtype(a.dtype), scales(a.scales), scale_group(a.scale_group) {}
  ConstActivations(const void* p, DType t) : data(p), dtype(t) {}
  operator const float*() const {  // NOLINT(google-explicit-constructor)
    assert(dtype == DType::kF32);
    return static_cast<const float*>(data);
  }
};

}  // namespace spl::kernels
