// Where decode_attention_cuda.cu finds K and V of a page in memory and in its ring, for each type of page.
#pragma once

#include <cstdint>

#include "kernels/common/kv_pool.h"
#include "kernels/cuda/cuda_ptx.h"

namespace spl::kernels::cuda::decode_attention {

// bf16.
template <int kHeadDim>
struct WideTiles {
  static constexpr bool kCodes = false;
  static constexpr int kRowBytes = 2 * kHeadDim;
  static constexpr int64_t kHalfBytes = int64_t{kPageTokens} * kRowBytes;
  static constexpr int kStageScale = 1;  // stages, relative to those of bf16
  // Byte of a 16-byte chunk in a stage.
  __device__ __forceinline__ static uint32_t Place(int token, int chunk) { return Swizzled<kRowBytes>(token, chunk); }
};

// Codes of e4m3. The scales of a page follow the codes of its halves (common/kv_pool.h).
template <int kHeadDim>
struct CodeTiles {
  static constexpr bool kCodes = true;
  static constexpr int kRowBytes = kHeadDim;
  static constexpr int64_t kScalesAt = int64_t{kPageTokens} * kHeadDim;
  static constexpr int64_t kHalfBytes = kScalesAt + kPageTokens;
  static constexpr int kStageScale = 2;
  // Eight lanes that load 16 bytes of K at once have two neighbouring rows and four chunks in a line, those of V the
  // rows 0, 2, 4, 6 or 1, 3, 5, 7 and two neighbouring chunks (d = 64: halves of them): all in different banks.
  __device__ __forceinline__ static uint32_t Place(int token, int chunk) {
    static_assert(kHeadDim == 64 || kHeadDim == 128);
    if constexpr (kHeadDim == 128)
      return static_cast<uint32_t>(token * 128 + ((chunk ^ (token & 6) ^ (token & 1) << 2) * 16));
    const int line = token / 2, place = (token % 2 * 4 + chunk) ^ ((line & 3) << 1);
    return static_cast<uint32_t>(line * 128 + place * 16);
  }
};

}  // namespace spl::kernels::cuda::decode_attention
