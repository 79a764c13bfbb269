// The memory that every attention kernel reads: fixed pages, each with K and V of 64 tokens of ONE (layer, KV head).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/dtype.h"

namespace spl::kernels {

inline constexpr int kPageTokens = 64;
inline constexpr int32_t kNoPage = -1;  // in a page table: these positions are not resident

// Bytes of 64 tokens of K or of V: rows of head_dim elements, row-major and contiguous. kE4M3: the codes of all rows,
// then a byte for each row, its scale (e4m3_rows.h).
constexpr size_t HalfPageBytes(DType dtype, int32_t head_dim) {
  const auto elements = static_cast<size_t>(kPageTokens) * static_cast<size_t>(head_dim);
  return elements * DTypeBytes(dtype) + (dtype == DType::kE4M3 ? size_t{kPageTokens} : 0);
}
constexpr size_t KvPageBytes(DType dtype, int32_t head_dim) { return 2 * HalfPageBytes(dtype, head_dim); }

// A borrowed view of the pool, or of one rank's part of it: pages [first_page, first_page + num_pages). Page p starts
// at base + (p - first_page) * page_bytes() and holds K [kPageTokens, head_dim], then V [kPageTokens, head_dim].
struct KvPoolView {
  std::byte* base = nullptr;   // 64-byte aligned
  DType dtype = DType::kBF16;  // kF32, kBF16 or kE4M3
  int32_t head_dim = 0;        // a multiple of 8
  int32_t num_pages = 0;
  int32_t first_page = 0;

  size_t half_bytes() const { return HalfPageBytes(dtype, head_dim); }
  size_t page_bytes() const { return 2 * half_bytes(); }
  std::byte* k(int32_t page) const { return base + static_cast<size_t>(page - first_page) * page_bytes(); }
  bool contains(int32_t page) const { return page >= first_page && page - first_page < num_pages; }
  std::byte* v(int32_t page) const { return k(page) + half_bytes(); }
  // The scales of the 64 rows of half a page of kE4M3, which begins at `half`.
  uint8_t* scales(std::byte* half) const {
    return reinterpret_cast<uint8_t*>(half + static_cast<size_t>(kPageTokens) * static_cast<size_t>(head_dim));
  }
};

}  // namespace spl::kernels
