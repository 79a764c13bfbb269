// Rows of half a page of K or of V (kv_pool.h) in any of its types, one value or one row at a time. Fast paths have
// their own loops; everything else reads and writes pages by these.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/dtype.h"
#include "kernels/common/e4m3_rows.h"
#include "kernels/common/kv_pool.h"

namespace spl::kernels {

// Whether the type can be that of pages.
constexpr bool IsKvType(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kE4M3; }

// Type of what operations derive from keys and keep in pages of the same pool: compact keys and bounds of granules. In
// a pool of kE4M3 it is bf16, which holds every value of a row: nothing is rounded.
constexpr DType DerivedKeyType(DType pool) { return pool == DType::kE4M3 ? DType::kBF16 : pool; }

// Bytes of a row's elements, without its scale.
constexpr int64_t KvRowBytes(DType dtype, int32_t head_dim) { return DTypeRowBytes(dtype, head_dim); }

// Element `at` of an array of kF32 or kBF16.
inline float LoadElement(const std::byte* from, DType dtype, int64_t at) {
  return dtype == DType::kF32 ? reinterpret_cast<const float*>(from)[at]
                              : ToFloat(reinterpret_cast<const bf16*>(from)[at]);
}
// Rounds to nearest even.
inline void StoreElement(std::byte* to, DType dtype, int64_t at, float value) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(to)[at] = value;
  } else {
    reinterpret_cast<bf16*>(to)[at] = ToBf16(value);
  }
}

// The scale of row `slot` of half a page of kE4M3.
inline uint8_t& KvRowScale(int32_t head_dim, std::byte* half, int32_t slot) {
  return reinterpret_cast<uint8_t*>(half)[int64_t{kPageTokens} * head_dim + slot];
}
inline uint8_t KvRowScale(int32_t head_dim, const std::byte* half, int32_t slot) {
  return reinterpret_cast<const uint8_t*>(half)[int64_t{kPageTokens} * head_dim + slot];
}

// Element c of row `slot` of half a page that begins at `half`.
inline float KvElement(DType dtype, int32_t head_dim, const std::byte* half, int32_t slot, int32_t c) {
  const int64_t at = int64_t{slot} * head_dim + c;
  if (dtype != DType::kE4M3) return LoadElement(half, dtype, at);
  return kE4M3Values[reinterpret_cast<const uint8_t*>(half)[at]] * RowScaleValue(KvRowScale(head_dim, half, slot));
}
inline float KvElement(const KvPoolView& pool, const std::byte* half, int32_t slot, int32_t c) {
  return KvElement(pool.dtype, pool.head_dim, half, slot, c);
}

// Row `slot` of half a page, widened. row: [head_dim].
inline void LoadKvRow(DType dtype, int32_t head_dim, const std::byte* half, int32_t slot, float* row) {
  const int64_t at = int64_t{slot} * head_dim;
  if (dtype == DType::kE4M3)
    return WidenRow(reinterpret_cast<const uint8_t*>(half) + at, KvRowScale(head_dim, half, slot), head_dim, row);
  for (int32_t c = 0; c < head_dim; ++c) row[c] = LoadElement(half, dtype, at + c);
}

// Rounds each value once; kE4M3: with the scale of the row, which is written too.
inline void StoreKvRow(DType dtype, int32_t head_dim, std::byte* half, int32_t slot, const float* row) {
  const int64_t at = int64_t{slot} * head_dim;
  if (dtype == DType::kE4M3) {
    KvRowScale(head_dim, half, slot) = QuantizeRow(row, head_dim, reinterpret_cast<uint8_t*>(half) + at);
    return;
  }
  for (int32_t c = 0; c < head_dim; ++c) StoreElement(half, dtype, at + c, row[c]);
}

// Copies rows bit for bit, with their scales. The rows are in different halves, or do not overlap.
inline void CopyKvRows(DType dtype, int32_t head_dim, const std::byte* from, int32_t from_slot, std::byte* to,
                       int32_t to_slot, int32_t count) {
  const auto row_bytes = static_cast<size_t>(KvRowBytes(dtype, head_dim));
  std::memcpy(to + static_cast<size_t>(to_slot) * row_bytes, from + static_cast<size_t>(from_slot) * row_bytes,
              static_cast<size_t>(count) * row_bytes);
  if (dtype != DType::kE4M3) return;
  const size_t scales = static_cast<size_t>(kPageTokens) * row_bytes;
  std::memcpy(to + scales + to_slot, from + scales + from_slot, static_cast<size_t>(count));
}

}  // namespace spl::kernels
