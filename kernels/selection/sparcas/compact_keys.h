// Layout of compact keys: chosen dimensions of the keys of one head stream, in pages of the pool that also holds the
// keys themselves (docs/methods/sparcas.md, K_compact).
#pragma once

#include <cstdint>

#include "kernels/common/kv_pool.h"
#include "kernels/common/kv_rows.h"

namespace spl::kernels {

// A compact page holds num_dims values of each of page_tokens() consecutive positions, in tiles of 64: tile t starts at
// element t * num_dims * 64 and is [num_dims, 64], dimension-major, in the pool's type. With head_dim 128 and 16
// dimensions that is 1,024 positions a page. In a pool of kE4M3 they are bf16 (dtype()), and a page holds half as many
// tiles, rounded down: it has room for 64 * (head_dim + 1) elements of bf16.
struct CompactKeys {
  int32_t head_dim = 0;
  int32_t num_dims = 0;  // a multiple of 4 that divides 2 * head_dim, at most head_dim
  DType pool = DType::kBF16;

  bool valid() const {
    return num_dims >= 4 && num_dims % 4 == 0 && num_dims <= head_dim && 2 * head_dim % num_dims == 0;
  }
  DType dtype() const { return DerivedKeyType(pool); }
  int32_t page_tokens() const { return kPageTokens * ((pool == DType::kE4M3 ? 1 : 2) * head_dim / num_dims); }
  int64_t num_pages(int64_t kv_len) const { return (kv_len + page_tokens() - 1) / page_tokens(); }
  // Element of its page that holds slot 0 for this position; slot i is 64 i elements further.
  int64_t element(int32_t position) const {
    const int32_t at = position % page_tokens();
    return int64_t{at / kPageTokens} * num_dims * kPageTokens + at % kPageTokens;
  }
};

}  // namespace spl::kernels
