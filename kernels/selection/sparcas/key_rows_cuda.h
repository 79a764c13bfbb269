// Rows of keys in pages of the pool as SelectTokens reads them on a device, one value at a time. Kv is the type of an
// element: float or __nv_bfloat16, or uint8_t for the codes of a pool of kE4M3 (common/e4m3_rows.h).
#pragma once

#include <type_traits>

#include "kernels/common/kv_pool.h"
#include "kernels/cuda/cuda_types.h"
#include "kernels/cuda/e4m3_cuda.h"

namespace spl::kernels::cuda::select_tokens {

template <typename Kv>
inline constexpr bool kCodes = std::is_same_v<Kv, uint8_t>;

// Type of compact keys in a pool of Kv: that of DerivedKeyType.
template <typename Kv>
using CompactType = std::conditional_t<kCodes<Kv>, __nv_bfloat16, Kv>;

// Size of a page, keys and values, in elements of Kv. Codes are bytes, and a row has one more for its scale.
template <typename Kv>
__device__ __forceinline__ int64_t PageElements(int head_dim) {
  return int64_t{2} * kPageTokens * (head_dim + (kCodes<Kv> ? 1 : 0));
}
// The keys of a page.
template <typename Kv>
__device__ __forceinline__ const Kv* KeysOf(const std::byte* pool, int32_t page, int head_dim) {
  return reinterpret_cast<const Kv*>(pool) + page * PageElements<Kv>(head_dim);
}

// The key in row `slot` of a page. Its elements are those of compact keys.
template <typename Kv>
struct KeyRow {
  const Kv* row;

  __device__ __forceinline__ KeyRow(const Kv* keys, int slot, int head_dim) : row(keys + slot * head_dim) {}
  // The same key where its row was copied to.
  __device__ __forceinline__ KeyRow CopiedTo(const char* copy) const {
    KeyRow other = *this;
    other.row = reinterpret_cast<const Kv*>(copy);
    return other;
  }
  __device__ __forceinline__ Kv operator[](int dim) const { return row[dim]; }
};
// bf16 holds every value of codes times their scale: the conversion rounds nothing.
template <>
struct KeyRow<uint8_t> {
  const uint8_t* row;
  float scale;

  __device__ __forceinline__ KeyRow(const uint8_t* keys, int slot, int head_dim)
      : row(keys + slot * head_dim), scale(RowScaleFloat(keys[kPageTokens * head_dim + slot])) {}
  __device__ __forceinline__ KeyRow CopiedTo(const char* copy) const {
    KeyRow other = *this;
    other.row = reinterpret_cast<const uint8_t*>(copy);
    return other;
  }
  __device__ __forceinline__ __nv_bfloat16 operator[](int dim) const {
    return __float2bfloat16_rn(E4M3Float(row[dim]) * scale);
  }
};

}  // namespace spl::kernels::cuda::select_tokens
