// Distance between freshly computed values and the cached ones: CacheBlend's score (docs/methods/baselines.md).
//
//   dev_i = Σ_{KV heads} Σ_{dims} (V_new[i] - V_cached[p_i])²
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/common/activations.h"
#include "kernels/rope/rope.h"

namespace spl::kernels {

// Runs before RopeWriteKv overwrites the pages.
struct ValueDeviationArgs {
  ConstActivations qkv;  // f32 [num_rows, (num_qo_heads + 2 * num_kv_heads) * head_dim], as RopeWriteKv takes it
  int32_t num_qo_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  KvPoolView pool;
  RopeSequence rows;  // CUDA reads the staged batch instead, where `sequence` is the number
  int32_t sequence = 0;
  int32_t layer = 0;
  float* scores = nullptr;  // [rows.row_end - rows.row_begin], device memory; overwritten
};

absl::Status ValidateValueDeviation(const ValueDeviationArgs& args);

namespace ref {
absl::Status ValueDeviation(const KernelContext& ctx, const ValueDeviationArgs& args);
}
namespace cpu {
absl::Status ValueDeviation(const KernelContext& ctx, const ValueDeviationArgs& args);
}

}  // namespace spl::kernels
