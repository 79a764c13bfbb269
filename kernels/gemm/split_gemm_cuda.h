// Products of bf16 on Hopper for some tens of rows, in which a cluster of blocks shares the columns of a tile:
// y = x Wᵀ + bias, or y += x Wᵀ + bias.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace spl::kernels::cuda {

inline constexpr int64_t kSplitGemmSizes = int64_t{1} << 22;  // num_rows and features are fewer

struct SplitGemmArgs {
  const void* x = nullptr;       // bf16 [num_rows, in_features]
  const void* weight = nullptr;  // bf16 [out_features, in_features]; no kernel in front writes it
  const float* bias = nullptr;   // [out_features], or null; no kernel in front writes it
  float* y = nullptr;            // [num_rows, out_features]
  bool add = false;              // y += the product, else y = the product
  int64_t num_rows = 0;          // 0 is a no-op
  int64_t out_features = 0;
  int64_t in_features = 0;  // a multiple of 8
};

// Sums are f32. Each block sums its columns in ascending order, 16 an instruction; the sums of the blocks are added in
// ascending order, and then y or the bias. So a row's result depends on nothing but the row and the weight. Reads the
// weight once for each 128 rows, and x once for each 128 features. Pointers are 16-byte aligned. cudaErrorNotSupported:
// another shape, or a device that is no sm_90.
cudaError_t SplitGemm(const SplitGemmArgs& args, cudaStream_t stream);
// The same with two or three blocks in a cluster, which is otherwise chosen by the number of features.
cudaError_t SplitGemm(const SplitGemmArgs& args, int splits, cudaStream_t stream);

// Whether it is faster than cuBLASLt's product (llama-3.1-8b's shape on an H200; others of as many blocks).
bool PrefersSplitGemm(int64_t num_rows, int64_t out_features, int64_t in_features);

}  // namespace spl::kernels::cuda
