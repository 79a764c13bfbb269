// The product of gate and up with SiLU in it, on Hopper: out = silu(x gateᵀ) · (x upᵀ). Gate and up stay in registers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace spl::kernels::cuda {

// From so many rows on it is faster than the product of cuBLASLt and SiluMul (llama-3.1-8b's shape, H100 and H200).
inline constexpr int64_t kGateUpSiluMinRows = 64;

inline constexpr int64_t kGateUpSiluSizes = int64_t{1} << 22;  // rows, width and in_features are fewer

struct GateUpSiluGemmArgs {
  const void* x = nullptr;       // bf16 [num_rows, in_features]
  const void* weight = nullptr;  // bf16 [2 * width, in_features]: gate, then up; no kernel in front writes it
  void* out = nullptr;           // bf16 [num_rows, width]
  int64_t num_rows = 0;          // 0 is a no-op
  int64_t width = 0;             // a multiple of 8
  int64_t in_features = 0;       // a multiple of 8
};

// Sums are f32 and ascend over in_features, 16 columns an instruction: a row's result depends on nothing but the row
// and the weight. Pointers are 16-byte aligned. cudaErrorNotSupported: another shape, or a device that is no sm_90.
cudaError_t GateUpSiluGemm(const GateUpSiluGemmArgs& args, cudaStream_t stream);

}  // namespace spl::kernels::cuda
