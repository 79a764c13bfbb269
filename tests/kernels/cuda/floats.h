// Elements of f32 or bf16 as tests of the CUDA backend compare them.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "kernels/common/dtype.h"

namespace spl::kernels {

inline std::vector<float> ToFloats(const std::vector<std::byte>& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / DTypeBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(&values[i], &bytes[4 * i], 4);
    } else {
      bf16 x;
      std::memcpy(&x, &bytes[2 * i], 2);
      values[i] = ToFloat(x);
    }
  }
  return values;
}

}  // namespace spl::kernels
