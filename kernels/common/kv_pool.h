// The memory that every attention kernel reads: fixed pages, each with K and V of 64 tokens of ONE (layer, KV head).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/dtype.h"

namespace spl::kernels {

inline constexpr int kPageTokens = 64;
inline constexpr int32_t kNoPage = -1;  // in a page table: these positions are not resident

// A borrowed view of the pool, or of one rank's part of it: pages [first_page, first_page + num_pages). Page p starts
// at base + (p - first_page) * page_bytes() and holds K [kPageTokens, head_dim], then V [kPageTokens, head_dim], both
// row-major and contiguous.
struct KvPoolView {
  std::byte* base = nullptr;   // 64-byte aligned
  DType dtype = DType::kBF16;  // kF32 or kBF16
  int32_t head_dim = 0;        // a multiple of 8
  int32_t num_pages = 0;
  int32_t first_page = 0;

  size_t half_bytes() const { return static_cast<size_t>(kPageTokens) * head_dim * DTypeBytes(dtype); }
  size_t page_bytes() const { return 2 * half_bytes(); }
  std::byte* k(int32_t page) const { return base + static_cast<size_t>(page - first_page) * page_bytes(); }
  bool contains(int32_t page) const { return page >= first_page && page - first_page < num_pages; }
  std::byte* v(int32_t page) const { return k(page) + half_bytes(); }
};

}  // namespace spl::kernels
