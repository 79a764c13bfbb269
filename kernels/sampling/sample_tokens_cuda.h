// SampleTokens on a device; the contract is sample_tokens.h's.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sampling/sample_tokens.h"

namespace spl::kernels::cuda {

// A SampleRow in the form that the kernel reads.
struct DeviceSampleRow {
  uint64_t random = 0;
  uint64_t min_weight = 0;          // sampling::MinWeight
  uint64_t top_p = 0;               // sampling::TopPFraction
  TokenEdit* kept_edits = nullptr;  // [num_edits] in device memory; null: the device keeps no list
  float scale = 0;                  // sampling::ScaleOf
  float repetition = 1, presence = 0, frequency = 0;
  int32_t logits_row = 0;
  int32_t top_k = 0;
  int32_t num_top = -1;
  int32_t num_edits = 0;
  int32_t edits_at = -1;  // first entry in the launch's `edits`, to write to kept_edits; -1: kept_edits are read
  int32_t changed = -1;   // entry of kept_edits that `change` replaces; -1: none
  int32_t mask_at = -1;   // first word in the launch's `masks`; -1: none
  int32_t bans_ends = 0;
  TokenEdit change;
};

// All pointers are device memory.
struct SampleTokensLaunch {
  const DeviceSampleRow* rows = nullptr;  // [rows] of the arguments
  const TokenEdit* edits = nullptr;
  const uint32_t* masks = nullptr;
  float* scratch = nullptr;  // SampleTokensScratchBytes
};

// Scratch for rows whose logits do not fit into shared memory; may be 0.
cudaError_t SampleTokensScratchBytes(const SampleTokensArgs& args, size_t* bytes);
// Asynchronous on `stream`.
cudaError_t SampleTokens(const SampleTokensArgs& args, const SampleTokensLaunch& launch, cudaStream_t stream);

}  // namespace spl::kernels::cuda
